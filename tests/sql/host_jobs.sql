-- Purpose: the seam to app.jobs: other names, an enum for the state, no attempt_id, a history row on each retry.
create or replace function settle.jobs_state(p_status app.job_status)
returns text
language sql
immutable
set search_path = pg_catalog, pg_temp
as $$
    select case p_status
        when 'new' then 'none' when 'waiting' then 'queued' when 'working' then 'running' when 'done' then 'success'
        when 'broken' then 'failed' when 'again' then 'up_for_retry' when 'later' then 'up_for_reschedule'
    end
$$;
comment on function settle.jobs_state(app.job_status) is 'A status of app.jobs in podsettle''s words.';

create or replace view settle.task_instance as
select
    j.job_id as id, j.pipeline::text as dag_id, j.run::text as run_id, j.step::text as task_id, j.part as map_index,
    null::text as operator, null::text as namespace, settle.jobs_state(j.status) as state, j.attempt_no as try_number,
    j.last_retried_attempt as max_tries, j.own_retries as retries, make_interval(secs => j.wait_seconds) as retry_delay,
    null::text as attempt_id, j.enqueued_at as queued_at, j.began_at as started_at, j.finished_at as ended_at,
    j.not_before as next_try_at
from app.jobs as j;
comment on view settle.task_instance is 'app.jobs as task instances.';

create or replace function settle.jobs_update()
returns trigger
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
    update app.jobs as j
    set status = case new.state
            when 'none' then 'new' when 'success' then 'done' when 'failed' then 'broken'
            when 'up_for_retry' then 'again' when 'up_for_reschedule' then 'later'
        end::app.job_status,
        last_retried_attempt = new.max_tries,
        finished_at = new.ended_at,
        not_before = new.next_try_at
    where j.job_id = old.id;
    return new;
end
$$;
comment on function settle.jobs_update() is 'Trigger: writes a settlement through the view.';

create or replace trigger jobs_update
instead of update on settle.task_instance
for each row execute function settle.jobs_update();

create or replace function settle.after_transition(p_settlement_ids bigint [])
returns void
language plpgsql
volatile
set search_path = pg_catalog, pg_temp
as $$
begin
    insert into app.job_history (job_id, attempt_no, kind, ended_at)
    select s.task_instance_id, s.try_number, s.failure_kind, s.settled_at
    from settle.settlement as s
    where s.id = any(p_settlement_ids) and s.state = 'up_for_retry';
end
$$;
comment on function settle.after_transition(bigint []) is 'Hook of the host: a history row for each retry.';
