-- Purpose: the host that podsettle brings: a table of task instances and the calls of an orchestrator.
-- A host gives settle.task_instance (table or updatable view) and settle.after_transition(); see docs/hosts.md.

create table if not exists settle.task_instance (
    id uuid not null default gen_random_uuid(),
    dag_id text not null,
    run_id text not null,
    task_id text not null,
    map_index integer not null default -1,
    operator text,
    namespace text,
    state text not null default 'none',
    try_number integer not null default 0,
    max_tries integer not null default 0,
    retries integer not null default 0,
    retry_delay interval not null default interval '5 min',
    attempt_id text,
    created_at timestamptz not null default now(),
    queued_at timestamptz,
    started_at timestamptz,
    ended_at timestamptz,
    next_try_at timestamptz,
    constraint task_instance_pkey primary key (id),
    constraint task_instance_name_key unique (dag_id, run_id, task_id, map_index),
    constraint task_instance_attempt_key unique (attempt_id),
    constraint task_instance_names_check check (
        length(dag_id) between 1 and 250 and length(run_id) between 1 and 250 and length(task_id) between 1 and 250
    ),
    constraint task_instance_state_check check (
        state in ('none', 'queued', 'running', 'success', 'failed', 'up_for_retry', 'up_for_reschedule')
    ),
    constraint task_instance_numbers_check check (
        map_index >= -1 and try_number >= 0 and retries >= 0 and max_tries >= retries and retry_delay >= interval '0'
    ),
    -- Whoever was dispatched has an attempt, and whoever has one was dispatched.
    constraint task_instance_attempt_check check (
        (try_number = 0) = (attempt_id is null)
        and (attempt_id is null) = (queued_at is null)
        and (try_number > 0 or state = 'none')
    ),
    constraint task_instance_times_check check (
        (state <> 'running' or started_at is not null)
        and (state in ('success', 'failed', 'up_for_retry', 'up_for_reschedule')) = (ended_at is not null)
        and (state in ('up_for_retry', 'up_for_reschedule')) = (next_try_at is not null)
    )
);
comment on table settle.task_instance is 'One row a task instance. Written by routines only.';
comment on column settle.task_instance.max_tries is
'the last try_number that is retried: retries, plus refunds, plus the attempts before a clear';
comment on column settle.task_instance.attempt_id is 'the current attempt; random, good for reporting on it alone';

-- An orchestrator looks for what is due; a pass looks for what is active.
create index if not exists task_instance_due_idx on settle.task_instance (next_try_at)
where state in ('up_for_retry', 'up_for_reschedule');
create index if not exists task_instance_active_idx on settle.task_instance (queued_at)
where state in ('queued', 'running');

-- Purpose: the host's hook, called with the ledger rows of each transition. This host needs nothing more written.
create or replace function settle.after_transition(p_settlement_ids bigint[])
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    return;
end
$$;
comment on function settle.after_transition(bigint[]) is 'Hook of the host: nothing to do in the standalone one.';

-- Purpose: makes a task instance, or finds the one that has these names. p_retries: retries beyond the first attempt.
-- Returns: its id. Raises: ST002. Tables written: settle.task_instance.
create or replace function settle.create_task(
    p_dag_id text,
    p_run_id text,
    p_task_id text,
    p_map_index integer default -1,
    p_retries integer default 0,
    p_retry_delay interval default interval '5 min',
    p_operator text default null,
    p_namespace text default null
)
returns uuid
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_id uuid;
begin
    begin
        insert into settle.task_instance (
            dag_id, run_id, task_id, map_index, retries, max_tries, retry_delay, operator, namespace)
        values (
            p_dag_id, p_run_id, p_task_id, p_map_index, p_retries, p_retries, p_retry_delay, p_operator, p_namespace)
        on conflict on constraint task_instance_name_key do nothing
        returning id into v_id;
    exception
        when check_violation or not_null_violation then
            raise exception 'task %/%/%[%] is not possible: %', p_dag_id, p_run_id, p_task_id, p_map_index, sqlerrm
                using errcode = 'ST002',
                hint = 'Names have 1 to 250 characters, map_index is -1 or more, retries and retry_delay are not negative.';
    end;
    if v_id is null then
        select t.id into strict v_id
        from settle.task_instance as t
        where t.dag_id = p_dag_id and t.run_id = p_run_id and t.task_id = p_task_id and t.map_index = p_map_index;
    end if;
    return v_id;
end
$$;
comment on function settle.create_task(text, text, text, integer, integer, interval, text, text) is
'Makes a task instance (or finds it) and returns its id.';

-- Purpose: begins an attempt: queued, the next try_number (the same one after a reschedule), a new attempt_id.
-- Returns: try_number and attempt_id, to be put on the pod. Raises: ST001 unknown, ST003 in a state that has an
-- attempt.
-- Tables written: settle.task_instance. Locks: its row. Clock: settle.clock().
create or replace function settle.dispatch(
    p_task_instance_id uuid, out try_number integer, out attempt_id text
)
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_state text;
begin
    select t.state into v_state
    from settle.task_instance as t
    where t.id = p_task_instance_id
    for update;
    if not found then
        raise exception 'there is no task instance %', coalesce(p_task_instance_id::text, 'null')
            using errcode = 'ST001', hint = 'settle.create_task() makes one.';
    end if;
    if v_state not in ('none', 'up_for_retry', 'up_for_reschedule') then
        raise exception 'task instance % is %, it cannot be dispatched', p_task_instance_id, v_state
            using errcode = 'ST003', hint = case
                when v_state in ('queued', 'running') then 'Its attempt is not settled yet.'
                else 'call settle.clear() to run it again.' end;
    end if;
    update settle.task_instance as t
    set state = 'queued',
        try_number = t.try_number + case when v_state = 'up_for_reschedule' then 0 else 1 end,
        attempt_id = gen_random_uuid()::text,
        queued_at = settle.clock(),
        started_at = null,
        ended_at = null,
        next_try_at = null
    where t.id = p_task_instance_id
    returning t.try_number, t.attempt_id into dispatch.try_number, dispatch.attempt_id;
end
$$;
comment on function settle.dispatch(uuid) is 'Begins an attempt; returns its try_number and attempt_id.';

-- Purpose: says that an attempt runs. Safe to repeat.
-- Returns: settled, duplicate (it runs or is settled already) or stale (another attempt is current).
-- Raises: ST002 for null. Tables written: settle.task_instance. Locks: its row. Clock: settle.clock().
create or replace function settle.started(p_attempt_id text)
returns text
language plpgsql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if p_attempt_id is null then
        raise exception 'an attempt_id is needed' using errcode = 'ST002', hint = 'settle.dispatch() returned it.';
    end if;
    update settle.task_instance as t
    set state = 'running', started_at = settle.clock()
    where t.attempt_id = p_attempt_id and t.state = 'queued';
    if found then
        return 'settled';
    end if;
    perform from settle.task_instance as t where t.attempt_id = p_attempt_id;
    return case when found then 'duplicate' else 'stale' end;
end
$$;
comment on function settle.started(text) is 'Says that an attempt runs.';
