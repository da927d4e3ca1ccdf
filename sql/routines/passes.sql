-- Purpose: what a pass of the reconciler calls, in this order: open_pass, settle_pods for each page, close_pass.

-- Purpose: opens a pass. Arguments: p_namespace its scope, null for all; p_profile; p_source api|files.
-- Returns: the pass id. Raises: ST002. Tables written: settle.pass. Locks: none.
create or replace function settle.open_pass(p_namespace text, p_profile text, p_source text)
returns bigint
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_id bigint;
begin
    if p_profile is null or p_source is null or p_source not in ('api', 'files') then
        raise exception 'a pass needs a profile and a source, not profile % and source %',
            coalesce(quote_literal(p_profile), 'null'), coalesce(quote_literal(p_source), 'null')
            using errcode = 'ST002', hint = 'Sources are api and files.';
    end if;
    insert into settle.pass (namespace, profile, source, opened_by)
    values (p_namespace, p_profile, p_source, session_user)
    returning id into v_id;
    return v_id;
end
$$;
comment on function settle.open_pass(text, text, text) is 'Opens a pass of the reconciler.';

-- Purpose: settles a page of pods in one round trip: match, classify, decide, write.
-- Arguments: p_pass an open pass; p_pods an array of pod facts (docs/sql.md).
-- Returns: one row a pod, in the order given. Raises: ST002 (no array), ST004 (no open pass), ST006 (bad facts).
-- Tables written: see settle.settle_evidence. Locks: see there.
create or replace function settle.settle_pods(p_pass bigint, p_pods jsonb)
returns table (
    ord integer,
    pod text,
    namespace text,
    task_instance_id uuid,
    try_number integer,
    final boolean,
    verdict text,
    from_record boolean,
    failure_kind text,
    reason text,
    rule text,
    disposition text,
    previous_state text,
    state text,
    previous_max_tries integer,
    max_tries integer,
    refund smallint,
    settlement_id bigint,
    why text
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_page settle.matched_pod[];
    v_outcomes settle.outcome[];
begin
    if jsonb_typeof(p_pods) is distinct from 'array' then
        raise exception 'pods must be a JSON array, not %', coalesce(jsonb_typeof(p_pods), 'null')
            using errcode = 'ST002', hint = 'Wrap a single pod''s facts in [ ].';
    end if;
    if not exists (select from settle.pass as p where p.id = p_pass and p.closed_at is null) then
        raise exception 'there is no open pass %', coalesce(p_pass::text, 'null')
            using errcode = 'ST004', hint = 'Open one with settle.open_pass().';
    end if;

    v_page := array(
        select m
        from jsonb_array_elements(p_pods) with ordinality as a (facts, n)
        cross join lateral settle.match_pod(a.n::integer, a.facts) as m
        order by a.n);
    v_outcomes := array(
        select o
        from settle.settle_evidence('pass', p_pass, array(
            select (
                m.ord, m.task_instance_id, m.try_number, m.attempt_id, m.created_at,
                coalesce((m.verdict).verdict, 'not_final'), (m.verdict).failure_kind, (m.verdict).reason,
                (m.verdict).exit_code, (m.verdict).reschedule_at, (m.verdict).from_record, (m.verdict).silence, false,
                (m.verdict).rule, m.namespace, m.pod, m.node, jsonb_strip_nulls(m.facts)
            )::settle.evidence
            from unnest(v_page) as m
            where m.problem is null)) as o);

    update settle.pass as p
    set counts = (
        select jsonb_object_agg(c.name, c.n)
        from (
            select u.name, sum(u.n) as n
            from (
                select e.key as name, e.value::bigint as n
                from jsonb_each_text(p.counts) as e
                union all
                select coalesce(o.disposition, 'unmatched'), 1
                from unnest(v_page) as m
                left join unnest(v_outcomes) as o on o.ord = m.ord
                union all
                select 'refunded', 1
                from unnest(v_outcomes) as o
                where o.refund = 1
            ) as u
            group by u.name
        ) as c)
    where p.id = p_pass and cardinality(v_page) > 0;

    return query
    select
        m.ord, m.pod, m.namespace, m.task_instance_id, m.try_number,
        (m.verdict).final, (m.verdict).verdict, (m.verdict).from_record, (m.verdict).failure_kind, (m.verdict).reason,
        (m.verdict).rule, coalesce(o.disposition, 'unmatched'), o.previous_state, o.state,
        o.previous_max_tries, o.max_tries, o.refund, o.settlement_id, coalesce(o.why, m.problem)
    from unnest(v_page) as m
    left join unnest(v_outcomes) as o on o.ord = m.ord
    order by m.ord;
end
$$;
comment on function settle.settle_pods(bigint, jsonb) is 'Settles a page of pod facts; one row a pod.';

-- Purpose: closes a pass. Arguments: p_complete, whether every pod of its scope was listed; p_seen, the task
-- instances
-- of which a pod of the current attempt was seen.
-- Returns: void. Raises: ST004. Tables written: settle.pass. Locks: its pass row.
create or replace function settle.close_pass(p_pass bigint, p_complete boolean, p_seen uuid[])
returns void
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    update settle.pass as p
    set closed_at = clock_timestamp(), complete = coalesce(p_complete, false)
    where p.id = p_pass and p.closed_at is null;
    if not found then
        raise exception 'there is no open pass %', coalesce(p_pass::text, 'null')
            using errcode = 'ST004', hint = 'Each pass is closed once.';
    end if;
end
$$;
comment on function settle.close_pass(bigint, boolean, uuid[]) is 'Closes a pass.';
