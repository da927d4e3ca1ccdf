-- Purpose: what people call in psql. Each prints one row: disposition, states, max_tries and the sentence that
-- says why.
-- All go through settle.settle_evidence, so nothing here decides anything. A wrong try_number answers "stale".
-- Raises: ST001 unknown task instance, ST002 bad argument. Tables written, locks: see settle.settle_evidence.

-- Purpose: settles one statement of a person and returns its outcome.
-- Arguments: p_try_number null: the current attempt, for what names none (a manual mark, a clear).
create or replace function settle.settle_for_person(
    p_task_instance_id uuid,
    p_try_number integer,
    p_verdict text,
    p_failure_kind text,
    p_reason text,
    p_exit_code integer,
    p_reschedule_at timestamptz
)
returns settle.outcome
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
declare
    v_outcome settle.outcome;
begin
    if p_try_number < 1 or (p_try_number is null and p_verdict <> 'clear' and p_failure_kind is distinct from 'manual') then
        raise exception 'try_number must be 1 or more, not %', coalesce(p_try_number::text, 'null')
            using errcode = 'ST002', hint = 'Name the attempt that you mean; settle.unsettled shows the current one.';
    end if;
    if p_failure_kind not in ('infra', 'application', 'timeout', 'manual') then
        raise exception '% is no failure kind', quote_literal(p_failure_kind)
            using errcode = 'ST002', hint = 'Kinds are infra, application, timeout, manual, or null where nothing proves one.';
    end if;
    if p_verdict = 'reschedule' and not coalesce(isfinite(p_reschedule_at), false) then
        raise exception 'a reschedule needs the time to run again at, not %', coalesce(p_reschedule_at::text, 'null')
            using errcode = 'ST002', hint = 'For example now() + interval ''5 min''.';
    end if;
    if length(p_reason) > 240 then
        raise exception 'the reason has % characters', length(p_reason)
            using errcode = 'ST002', hint = 'The ledger keeps at most 240.';
    end if;
    perform from settle.task_instance as t where t.id = p_task_instance_id;
    if not found then
        raise exception 'there is no task instance %', coalesce(p_task_instance_id::text, 'null')
            using errcode = 'ST001', hint = 'Look it up in settle.unsettled or settle.settlements.';
    end if;
    select o.* into v_outcome
    from settle.settle_evidence('person', null, array[(
        1, p_task_instance_id, p_try_number, null, null, p_verdict, p_failure_kind, p_reason, p_exit_code, p_reschedule_at,
        false, null, null, 'person', null, null, null, jsonb_build_object('person', session_user)
    )::settle.evidence]) as o;
    return v_outcome;
end
$$;
comment on function settle.settle_for_person(uuid, integer, text, text, text, integer, timestamptz) is
'Settles what a person says.';

-- Purpose: settles an attempt as success.
create or replace procedure settle.succeed(
    in p_task_instance_id uuid,
    in p_try_number integer,
    inout disposition text default null,
    inout previous_state text default null,
    inout state text default null,
    inout max_tries integer default null,
    inout why text default null
)
language sql
security definer
set search_path = pg_catalog, pg_temp
as $$
    select o.disposition, o.previous_state, o.state, o.max_tries, o.why
    from settle.settle_for_person(p_task_instance_id, p_try_number, 'success', null, null, null, null) as o
$$;
comment on procedure settle.succeed (uuid, integer, text, text, text, integer, text) is
'Settles an attempt as success.';

-- Purpose: settles an attempt as failed. p_kind infra|application|timeout|manual, null where nothing proves one.
create or replace procedure settle.fail(
    in p_task_instance_id uuid,
    in p_try_number integer,
    in p_kind text default null,
    in p_reason text default null,
    in p_exit_code integer default null,
    inout disposition text default null,
    inout previous_state text default null,
    inout state text default null,
    inout max_tries integer default null,
    inout why text default null
)
language sql
security definer
set search_path = pg_catalog, pg_temp
as $$
    select o.disposition, o.previous_state, o.state, o.max_tries, o.why
    from settle.settle_for_person(p_task_instance_id, p_try_number, 'failed', p_kind, p_reason, p_exit_code, null) as o
$$;
comment on procedure settle.fail (uuid, integer, text, text, integer, text, text, text, integer, text) is
'Settles an attempt as failed.';

-- Purpose: settles an attempt as to be run again at a time, with the same try_number.
create or replace procedure settle.reschedule(
    in p_task_instance_id uuid,
    in p_try_number integer,
    in p_at timestamptz,
    inout disposition text default null,
    inout previous_state text default null,
    inout state text default null,
    inout max_tries integer default null,
    inout why text default null
)
language sql
security definer
set search_path = pg_catalog, pg_temp
as $$
    select o.disposition, o.previous_state, o.state, o.max_tries, o.why
    from settle.settle_for_person(p_task_instance_id, p_try_number, 'reschedule', null, null, null, p_at) as o
$$;
comment on procedure settle.reschedule (uuid, integer, timestamptz, text, text, text, integer, text) is
'Settles an attempt as to be run again at a time.';

-- Purpose: marks the current attempt failed, kind manual: no retry, no refund. p_note is kept as the reason.
create or replace procedure settle.mark_failed(
    in p_task_instance_id uuid,
    in p_note text default null,
    inout disposition text default null,
    inout previous_state text default null,
    inout state text default null,
    inout max_tries integer default null,
    inout why text default null
)
language sql
security definer
set search_path = pg_catalog, pg_temp
as $$
    select o.disposition, o.previous_state, o.state, o.max_tries, o.why
    from settle.settle_for_person(p_task_instance_id, null, 'failed', 'manual', p_note, null, null) as o
$$;
comment on procedure settle.mark_failed (uuid, text, text, text, text, integer, text) is
'Marks a task instance failed by hand: kind manual, no retry.';

-- Purpose: clears a task instance, whatever its state: it can be dispatched again, with retries and refunds anew.
create or replace procedure settle.clear(
    in p_task_instance_id uuid,
    inout disposition text default null,
    inout previous_state text default null,
    inout state text default null,
    inout max_tries integer default null,
    inout why text default null
)
language sql
security definer
set search_path = pg_catalog, pg_temp
as $$
    select o.disposition, o.previous_state, o.state, o.max_tries, o.why
    from settle.settle_for_person(p_task_instance_id, null, 'clear', null, null, null, null) as o
$$;
comment on procedure settle.clear (uuid, text, text, text, integer, text) is
'Clears a task instance for a new life.';

-- Purpose: registers a listener (again): it gets an outbox row for each transition from now on.
-- Raises: ST002. Tables written: settle.listener.
create or replace function settle.register_listener(p_name text)
returns void
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if p_name is null or p_name !~ '^[a-z0-9][a-z0-9_.-]{0,62}$' then
        raise exception '% is no listener name', coalesce(quote_literal(p_name), 'null')
            using errcode = 'ST002', hint = 'Lower-case letters, digits, dot, dash and underscore, at most 63.';
    end if;
    insert into settle.listener (name) values (p_name)
    on conflict on constraint listener_pkey do update set enabled = true;
end
$$;
comment on function settle.register_listener(text) is 'Registers a listener for all transitions from now on.';

-- Purpose: stops telling a listener; what is already in the outbox stays.
-- Raises: ST001. Tables written: settle.listener.
create or replace function settle.unregister_listener(p_name text)
returns void
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    update settle.listener as n set enabled = false where n.name = p_name;
    if not found then
        raise exception 'there is no listener %', coalesce(quote_literal(p_name), 'null')
            using errcode = 'ST001', hint = 'settle.register_listener() makes one.';
    end if;
end
$$;
comment on function settle.unregister_listener(text) is 'Stops telling a listener.';
