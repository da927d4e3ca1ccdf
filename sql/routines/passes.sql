-- Purpose: what a pass of the reconciler calls, in this order: open_pass, note_clock, settle_pods for each page,
--   close_pass. A pass that dies leaves nothing that the next one would not do again.

-- Purpose: opens a pass. Arguments: p_namespace its scope, null for all; p_profile; p_source api|files.
-- Returns: the pass id, or null while another pass of this scope holds the lease (source api only).
-- Raises: ST002. Tables written: settle.pass, settle.lease. Locks: the scope's lease row.
create or replace function settle.open_pass(p_namespace text, p_profile text, p_source text)
returns bigint
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_id bigint;
    v_now timestamptz;
begin
    if p_profile is null or p_source is null or p_source not in ('api', 'files') then
        raise exception 'a pass needs a profile and a source, not profile % and source %',
            coalesce(quote_literal(p_profile), 'null'), coalesce(quote_literal(p_source), 'null')
            using errcode = 'ST002', hint = 'Sources are api and files.';
    end if;
    v_now := settle.clock();
    insert into settle.pass (opened_at, namespace, profile, source, opened_by)
    values (v_now, p_namespace, p_profile, p_source, session_user)
    returning id into v_id;
    if p_source = 'api' then
        insert into settle.lease as l (scope, pass_id, until)
        values (settle.lease_scope(p_namespace), v_id, v_now + settle.setting_value('pass_lease')::interval)
        on conflict on constraint lease_pkey do update
        set pass_id = excluded.pass_id, until = excluded.until
        where l.until <= v_now;
        if not found then
            delete from settle.pass as p where p.id = v_id;
            return null;
        end if;
    end if;
    return v_id;
end
$$;
comment on function settle.open_pass(text, text, text) is 'Opens a pass; null: another one is at work.';

-- Purpose: the name of a scope in settle.lease: a namespace, or all of them (no namespace is called *).
create or replace function settle.lease_scope(p_namespace text)
returns text
language sql
immutable
parallel safe
set search_path = pg_catalog, pg_temp
as $$ select coalesce(p_namespace, '*') $$;
comment on function settle.lease_scope(text) is 'The name of a pass''s scope.';

-- Purpose: raises ST004 unless the pass is open.
create or replace function settle.check_open_pass(p_pass bigint)
returns void
language plpgsql
stable
set search_path = pg_catalog, pg_temp
as $$
begin
    if not exists (select from settle.pass as p where p.id = p_pass and p.closed_at is null) then
        raise exception 'there is no open pass %', coalesce(p_pass::text, 'null')
            using errcode = 'ST004', hint = 'Open one with settle.open_pass(); each is closed once.';
    end if;
end
$$;
comment on function settle.check_open_pass(bigint) is 'Refuses a pass that is not open.';

-- Purpose: keeps the API server's clock against the database's, for hosts that have no attempt_id.
-- Arguments: p_api_time its Date header; p_age how long ago that came.
-- Returns: the difference, API server minus database, good to half a second. Raises: ST004.
-- Tables written: settle.pass. Locks: its row. Clock: settle.clock().
create or replace function settle.note_clock(p_pass bigint, p_api_time timestamptz, p_age interval)
returns interval
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_offset interval;
begin
    perform settle.check_open_pass(p_pass);
    -- A Date header is a whole second, cut off: on average it is half a second late.
    v_offset := p_api_time + interval '0.5 s' - (settle.clock() - p_age);
    update settle.pass as p set clock_offset = v_offset where p.id = p_pass;
    return v_offset;
end
$$;
comment on function settle.note_clock(bigint, timestamptz, interval) is
'Keeps the API server''s clock against the database''s.';

-- Purpose: settles a page of pods in one round trip: match, classify, decide, write; keeps what is only suspected.
-- Arguments: p_pass an open pass; p_pods an array of pod facts (docs/sql.md).
-- Returns: one row a pod, in the order given. Raises: ST002 (no array), ST004 (no open pass), ST006 (bad facts).
-- Tables written: see settle.settle_evidence; settle.stranger, settle.suspicion, settle.pass, settle.lease.
-- Locks: see settle.settle_evidence; then suspicions, then strangers, in id order; then its own pass and lease.
create or replace function settle.settle_pods(p_pass bigint, p_pods jsonb)
returns setof settle.settled_pod
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_page settle.matched_pod[];
    v_outcomes settle.outcome[];
    v_rows settle.settled_pod[];
begin
    if jsonb_typeof(p_pods) is distinct from 'array' then
        raise exception 'pods must be a JSON array, not %', coalesce(jsonb_typeof(p_pods), 'null')
            using errcode = 'ST002', hint = 'Wrap a single pod''s facts in [ ].';
    end if;
    perform settle.check_open_pass(p_pass);

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
    v_rows := array(
        select (
            m.ord, m.pod, m.namespace, m.task_instance_id, m.try_number,
            (m.verdict).final, (m.verdict).verdict, (m.verdict).from_record, (m.verdict).failure_kind,
            (m.verdict).reason, (m.verdict).rule, coalesce(o.disposition, 'unmatched'), o.previous_state, o.state,
            o.previous_max_tries, o.max_tries, o.refund, o.settlement_id, coalesce(o.why, m.problem),
            settle.may_go(o.disposition, m), settle.clock() - o.settled_at
        )::settle.settled_pod
        from unnest(v_page) as m
        left join unnest(v_outcomes) as o on o.ord = m.ord
        order by m.ord);

    perform settle.suspect(p_pass, array(
        select (
            m.ord, m.task_instance_id, o.try_number, m.attempt_id, m.created_at, 'failed',
            case when (m.verdict).final then (m.verdict).failure_kind else (m.verdict).overdue_kind end,
            case when (m.verdict).final then (m.verdict).reason else (m.verdict).overdue_reason end,
            (m.verdict).exit_code, null, false, (m.verdict).silence, false,
            (m.verdict).rule, m.namespace, m.pod, m.node, jsonb_strip_nulls(m.facts)
        )::settle.evidence
        from unnest(v_page) as m
        inner join unnest(v_outcomes) as o on o.ord = m.ord
        where o.disposition = 'suspected'));
    perform settle.note_strangers(v_page);
    perform settle.count_outcomes(p_pass, v_rows);
    return query select r.* from unnest(v_rows) as r order by r.ord;
end
$$;
comment on function settle.settle_pods(bigint, jsonb) is 'Settles a page of pod facts; one row a pod.';

-- Purpose: adds what was done to the counts of a pass and renews its lease.
-- Tables written: settle.pass, settle.lease. Locks: both rows, in this order. Clock: settle.clock().
create or replace function settle.count_outcomes(p_pass bigint, p_rows settle.settled_pod[])
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    update settle.pass as p
    set counts = (
        select jsonb_object_agg(c.name, c.n)
        from (
            select u.name, sum(u.n) as n
            from (
                select e.key as name, e.value::bigint as n
                from jsonb_each_text(p.counts) as e
                union all
                select r.disposition, 1
                from unnest(p_rows) as r
                union all
                select 'refunded', 1
                from unnest(p_rows) as r
                where r.refund = 1
            ) as u
            group by u.name
        ) as c)
    where p.id = p_pass and cardinality(p_rows) > 0;
    update settle.lease as l
    set until = settle.clock() + settle.setting_value('pass_lease')::interval
    where l.pass_id = p_pass;
end
$$;
comment on function settle.count_outcomes(bigint, settle.settled_pod[]) is 'Counts what a pass did.';

-- Purpose: closes a pass. A complete one judges silence: who is absent, which suspicions ripened, which died.
-- Arguments: p_complete, whether every pod of its scope was listed; p_seen, the task instances of which a pod of the
-- current attempt was seen.
-- Returns: one row for each ripened suspicion. Raises: ST004.
-- Tables written: see settle.judge_silence; settle.pass, settle.lease. Locks: see there; then pass and lease.
create or replace function settle.close_pass(p_pass bigint, p_complete boolean, p_seen uuid[])
returns setof settle.settled_pod
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_rows settle.settled_pod[] := array[]::settle.settled_pod[];
begin
    perform settle.check_open_pass(p_pass);
    if p_complete then
        v_rows := array(select r from settle.judge_silence(p_pass, coalesce(p_seen, '{}')) as r);
    end if;
    perform settle.count_outcomes(p_pass, v_rows);
    update settle.pass as p
    -- A clock that stepped back must not keep a pass open.
    set closed_at = greatest(settle.clock(), p.opened_at), complete = coalesce(p_complete, false)
    where p.id = p_pass;
    delete from settle.lease as l where l.pass_id = p_pass;
    return query select r.* from unnest(v_rows) as r;
end
$$;
comment on function settle.close_pass(bigint, boolean, uuid[]) is 'Closes a pass; a complete one judges silence.';
