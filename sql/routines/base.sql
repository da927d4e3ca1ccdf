-- Purpose: small readers that other routines share.

-- Purpose: the version of the contract between database and command; raised when one cannot work with the other.
create or replace function settle.contract_version()
returns integer
language sql
immutable
parallel safe
set search_path = pg_catalog, pg_temp
as $$ select 1 $$;
comment on function settle.contract_version() is 'The contract that this database speaks; the command checks it first.';

-- Purpose: one stable key for a task instance, whatever its host does to its id at a retry (facts: Airflow
-- rotates it).
-- Returns: a UUID; lengths are part of what is hashed, so no two tuples share a text.
create or replace function settle.task_key(p_dag_id text, p_run_id text, p_task_id text, p_map_index integer)
returns uuid
language sql
immutable
parallel safe
set search_path = pg_catalog, pg_temp
as $$
    select md5(format('%s:%s/%s:%s/%s:%s/%s',
        length(p_dag_id), p_dag_id, length(p_run_id), p_run_id, length(p_task_id), p_task_id, p_map_index))::uuid
$$;
comment on function settle.task_key(text, text, text, integer) is 'The key of a task instance in the ledger.';

-- Purpose: reads a setting as text. Returns null for a name that does not exist.
create or replace function settle.setting_value(p_name text)
returns text
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$ select s.value from settle.setting as s where s.name = p_name $$;
comment on function settle.setting_value(text) is 'A setting''s value.';

-- Purpose: the refund cap of a task: its own row, else its DAG's, else the setting.
create or replace function settle.refund_cap(p_dag_id text, p_task_id text)
returns integer
language sql
stable
set search_path = pg_catalog, pg_temp
as $$
    select coalesce(
        (select p.max_infra_refunds
         from settle.refund_policy as p
         where p.dag_id = p_dag_id and (p.task_id = p_task_id or p.task_id is null)
         order by p.task_id is null
         limit 1),
        settle.setting_value('max_infra_refunds')::integer)
$$;
comment on function settle.refund_cap(text, text) is 'How many infra failures of one task are refunded.';

-- Purpose: the wait before an infra retry: spread over the jitter by a hash of task and attempt, so that the
--   tasks of a lost node do not return in one instant and a repeated pass computes the same moment.
create or replace function settle.infra_backoff(p_task_key uuid, p_try_number integer)
returns interval
language sql
stable
set search_path = pg_catalog, pg_temp
as $$
    select settle.setting_value('infra_retry_delay')::interval
        + settle.setting_value('infra_retry_jitter')::interval
        * (('x' || substr(md5(p_task_key::text || '/' || p_try_number), 1, 8))::bit(32)::bigint / 4294967295.0)
$$;
comment on function settle.infra_backoff(uuid, integer) is 'The wait before an infra retry of one attempt.';
