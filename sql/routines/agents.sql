-- Purpose: what an agent in a task pod calls, for its own attempt alone. The attempt_id is random: who cannot read
--   the pod cannot report for it. Arguments are named like JSON keys, so that PostgREST can expose both as they are.
--   Safe to retry for ever.

-- Purpose: reports the outcome of an attempt: success, failed or reschedule.
-- Returns: disposition (settled, overrode, confirmed, duplicate, stale), state, and the sentence that says why.
--   stale: this attempt is not the current one of any task instance, so the agent may stop.
-- Raises: ST002. Tables written, locks: see settle.settle_evidence.
create or replace function settle.report(
    attempt_id text,
    outcome text,
    exit_code integer default null,
    failure_kind text default null,
    reason text default null,
    reschedule_at timestamptz default null,
    out disposition text,
    out state text,
    out why text
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    v_id uuid;
    v_try_number integer;
begin
    if report.attempt_id is null then
        raise exception 'an attempt_id is needed' using errcode = 'ST002', hint = 'It stands in the pod''s annotations.';
    end if;
    if report.outcome is null or report.outcome not in ('success', 'failed', 'reschedule') then
        raise exception '% is no outcome', coalesce(quote_literal(left(report.outcome, 60)), 'null')
            using errcode = 'ST002', hint = 'Outcomes are success, failed and reschedule.';
    end if;
    -- Infra and manual are not an agent's to say: it would refund itself.
    if report.failure_kind not in ('application', 'timeout') then
        raise exception '% is no failure kind of an agent', quote_literal(left(report.failure_kind, 60))
            using errcode = 'ST002', hint = 'An agent says application or timeout, or nothing.';
    end if;
    if report.outcome = 'reschedule' and not coalesce(isfinite(report.reschedule_at), false) then
        raise exception 'a reschedule needs reschedule_at'
            using errcode = 'ST002', hint = 'RFC 3339 with a zone, as in the record.';
    end if;
    select t.id, t.try_number into v_id, v_try_number
    from settle.task_instance as t
    where t.attempt_id = report.attempt_id;
    if not found then
        disposition := 'stale';
        why := 'no task instance has this attempt as its current one';
        return;
    end if;
    select o.disposition, o.state, o.why into disposition, state, why
    from settle.settle_evidence('report', null, array[(
        1, v_id, v_try_number, report.attempt_id, null, report.outcome,
        case when report.outcome = 'failed' then coalesce(report.failure_kind, 'application') end,
        case when report.outcome = 'failed' then coalesce(left(report.reason, 240), 'Error') end,
        report.exit_code, case when report.outcome = 'reschedule' then report.reschedule_at end,
        false, null, false, 'report', null, null, null,
        jsonb_strip_nulls(jsonb_build_object('report', report.outcome, 'exit_code', report.exit_code))
    )::settle.evidence]) as o;
end
$$;
comment on function settle.report(text, text, integer, text, text, timestamptz) is
'Reports the outcome of an attempt; safe to retry.';

-- Purpose: keeps a value that a task hands on (return value, link, XCom) under its attempt. The last value of a key
--   counts, until the attempt is settled for good.
-- Returns: disposition (settled: kept; duplicate: the attempt is settled, nothing was written; stale) and why.
-- Raises: ST002. Tables written: settle.pushed. Locks: the task instance's row. Clock: settle.clock().
create or replace function settle.push(
    attempt_id text,
    key text,
    value jsonb,
    out disposition text,
    out why text
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    c_largest constant integer := 1048576;
    v_id uuid;
    v_state text;
    v_task_key uuid;
    v_provisional boolean;
begin
    if push.attempt_id is null or coalesce(length(push.key), 0) not between 1 and 250 then
        raise exception 'a push needs an attempt_id and a key of 1 to 250 characters'
            using errcode = 'ST002', hint = 'The attempt_id stands in the pod''s annotations.';
    end if;
    if push.value is null or length(push.value::text) > c_largest then
        raise exception 'the value of key % is %', quote_literal(push.key),
            case when push.value is null then 'missing' else 'larger than 1 MiB' end
            using errcode = 'ST002', hint = 'Push a reference to large data, and JSON null for no value.';
    end if;
    select t.id, t.state, settle.task_key(t.dag_id, t.run_id, t.task_id, t.map_index)
    into v_id, v_state, v_task_key
    from settle.task_instance as t
    where t.attempt_id = push.attempt_id
    for update;
    if not found then
        disposition := 'stale';
        why := 'no task instance has this attempt as its current one';
        return;
    end if;
    if v_state not in ('queued', 'running') then
        select s.provisional into v_provisional
        from settle.settlement as s
        where s.task_key = v_task_key
        order by s.id desc
        limit 1;
        -- A task that was given up on too early may still hand on what it made, and then succeed.
        if not coalesce(v_provisional, false) then
            disposition := 'duplicate';
            why := format('the task instance is already %s', v_state);
            return;
        end if;
    end if;
    insert into settle.pushed as p (attempt_id, key, value, task_instance_id, pushed_at)
    values (push.attempt_id, push.key, push.value, v_id, settle.clock())
    on conflict on constraint pushed_pkey do update
    set value = excluded.value, pushed_at = excluded.pushed_at;
    disposition := 'settled';
    why := 'kept';
end
$$;
comment on function settle.push(text, text, jsonb) is 'Keeps a value that a task hands on; safe to retry.';
