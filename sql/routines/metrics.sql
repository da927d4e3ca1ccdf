-- Purpose: what dashboards read beside the views: reasons made few enough for a label, the history of one task,
--   and the figures of the report. All of it from the ledger.

-- Purpose: a reason as the value of a label. Whatever a pod, a record or a person wrote must not make new series.
-- Returns: the reason if it is one that Kubernetes, podsettle or a failure rule of an operator names; `none` for null;
--   OutOf for all of OutOfcpu, OutOfmemory, ...; else `other`. Tables written: none.
create or replace function settle.metric_reason(p_reason text)
returns text
language sql
stable
-- A view reads it, and a function in a view runs with the rights of whoever reads.
security definer
set search_path = pg_catalog, pg_temp
as $$
    select case
        when p_reason is null then 'none'
        when p_reason ~ '^OutOf[a-z-]{1,40}$' then 'OutOf'
        when p_reason = any(array[
            'Error', 'OOMKilled', 'NoRecord', 'Completed', 'Unknown', 'InitContainerFailed', 'ExecutionTimeout',
            'DeadlineExceeded', 'Evicted', 'PodDeleted', 'PodAbsent', 'StartError', 'ContainerCannotRun',
            'ContainerStatusUnknown', 'EvictionByEvictionAPI', 'PreemptionByScheduler', 'DeletionByTaintManager',
            'DeletionByPodGC', 'DeletionByDeviceTaintManager', 'TerminationByKubelet', 'PreemptionByKubeScheduler',
            'Terminated', 'NodeShutdown', 'Shutdown', 'Preempting', 'NodeLost', 'NodeAffinity', 'NodePorts', 'NodeName',
            'TaintToleration', 'UnexpectedAdmissionError', 'TopologyAffinityError', 'ImagePullBackOff', 'ErrImagePull',
            'InvalidImageName', 'ErrImageNeverPull', 'ImageInspectError', 'RegistryUnavailable',
            'CreateContainerConfigError', 'CreateContainerError', 'RunContainerError', 'CrashLoopBackOff'
        ]) then p_reason
        when exists (
            select
            from settle.failure_rule as r
            where r.origin = 'operator' and r.reason = p_reason and r.reason !~ '^\$') then p_reason
        else 'other'
    end
$$;
comment on function settle.metric_reason(text) is 'A reason as the value of a label: from a closed list, else other.';

-- Purpose: how long the task container of a ledger row ran, by its own two times.
-- Returns: null where the evidence does not hold both. Tables written: none.
create or replace function settle.ran_for(p_evidence jsonb)
returns interval
language sql
stable
set search_path = pg_catalog, pg_temp
as $$
    select case
        when p_evidence -> 'container' ->> 'started_at' ~ '^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d'
            and p_evidence -> 'container' ->> 'finished_at' ~ '^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d'
            then greatest(
                (p_evidence -> 'container' ->> 'finished_at')::timestamptz
                - (p_evidence -> 'container' ->> 'started_at')::timestamptz,
                interval '0')
    end
$$;
comment on function settle.ran_for(jsonb) is 'How long the task container of a ledger row ran.';

-- Purpose: the whole history of one task instance, oldest first, with the evidence.
-- Arguments: p_task_instance_id; or its names, p_map_index -1 if it is not mapped.
-- Returns: its ledger rows; none if it is not known. Tables written: none.
create or replace function settle.task_history(
    p_task_instance_id uuid, p_dag_id text, p_run_id text, p_task_id text, p_map_index integer
)
returns setof settle.settlement
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_key uuid := settle.task_key(p_dag_id, p_run_id, p_task_id, p_map_index);
begin
    if p_task_instance_id is not null then
        select settle.task_key(t.dag_id, t.run_id, t.task_id, t.map_index) into v_key
        from settle.task_instance as t
        where t.id = p_task_instance_id;
        if not found then
            -- An id that its host has replaced since, or a task instance that it deleted.
            select s.task_key into v_key
            from settle.settlement as s
            where s.task_instance_id = p_task_instance_id
            order by s.id desc
            limit 1;
        end if;
    end if;
    return query
    select s.* from settle.settlement as s where s.task_key = v_key order by s.id;
end
$$;
comment on function settle.task_history(uuid, text, text, text, integer) is
'The ledger rows of one task instance, oldest first.';

-- Purpose: the figures of podsettle report, all in one statement, so that they agree with each other.
-- Arguments: p_days how far back, from now. Returns: one object. Raises: ST002.
-- Tables written: none. Clock: settle.clock().
create or replace function settle.report_figures(p_days integer)
returns jsonb
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    v_until timestamptz := settle.clock();
    v_from timestamptz;
    v_unit text;
begin
    if p_days is null or p_days not between 1 and 3660 then
        raise exception 'a report covers 1 to 3660 days, not %', coalesce(p_days::text, 'null')
            using errcode = 'ST002', hint = 'For example 30.';
    end if;
    v_unit := case when p_days <= 2 then 'hour' when p_days <= 92 then 'day' else 'week' end;
    v_from := date_trunc(v_unit, v_until - make_interval(days => p_days), 'utc');
    return (
        with ledger as materialized (
            select
                s.settled_at, s.dag_id, s.task_id, s.failure_kind, s.refund, s.node, s.verdict, s.disposition, s.source,
                s.from_record, s.provisional, coalesce(s.reason, 'none') as reason,
                extract(epoch from settle.ran_for(s.evidence))::double precision / 3600 as hours,
                s.disposition = 'settled' and s.verdict = 'failed' as is_failure,
                -- What only the pod knew: without its record the work would have been done again.
                s.verdict = 'success' and s.source = 'pass' as is_kept,
                s.verdict = 'failed' and s.failure_kind = 'infra' and s.refund = 0 and s.disposition = 'settled'
                as is_refused,
                date_trunc(v_unit, s.settled_at, 'utc') as bucket
            from settle.settlement as s
            where s.settled_at >= v_from and s.settled_at <= v_until
        )
        select jsonb_build_object(
            'from', v_from, 'until', v_until, 'unit', v_unit,
            'totals', (
                select jsonb_build_object(
                    'settlements', count(*) filter (where l.disposition <> 'confirmed'),
                    'failures', count(*) filter (where l.is_failure),
                    'refunds', coalesce(sum(l.refund) filter (where l.refund = 1), 0),
                    'taken_back', count(*) filter (where l.refund = -1),
                    'refused', count(*) filter (where l.is_refused),
                    'kept', count(*) filter (where l.is_kept),
                    'kept_hours', coalesce(sum(l.hours) filter (where l.is_kept), 0),
                    'kept_timed', count(l.hours) filter (where l.is_kept),
                    'lost_hours', coalesce(sum(l.hours) filter (where l.is_failure), 0))
                from ledger as l),
            'by_kind', (
                select coalesce(jsonb_object_agg(k.kind, k.n), '{}')
                from (
                    select coalesce(l.failure_kind, 'unknown') as kind, count(*) as n
                    from ledger as l where l.is_failure group by 1
                ) as k),
            'by_time', (
                select jsonb_agg(
                    jsonb_build_object('at', b.at at time zone 'utc', 'kinds', coalesce(c.kinds, '{}'))
                    order by b.at)
                from generate_series(
                    v_from at time zone 'utc', v_until at time zone 'utc', ('1 ' || v_unit)::interval) as b (at)
                left join (
                    select k.bucket, jsonb_object_agg(k.kind, k.n) as kinds
                    from (
                        select l.bucket, coalesce(l.failure_kind, 'unknown') as kind, count(*) as n
                        from ledger as l where l.is_failure group by 1, 2
                    ) as k
                    group by 1
                ) as c on c.bucket = b.at at time zone 'utc'),
            'reasons', (
                select coalesce(jsonb_agg(to_jsonb(r) order by r.failures desc, r.hours desc, r.reason, r.kind), '[]')
                from (
                    select
                        l.reason, coalesce(l.failure_kind, 'unknown') as kind, count(*) as failures,
                        count(*) filter (where l.refund = 1) as refunds, coalesce(sum(l.hours), 0) as hours
                    from ledger as l where l.is_failure
                    group by 1, 2 order by 3 desc, 5 desc, 1, 2 limit 10
                ) as r),
            'nodes', (
                select coalesce(jsonb_agg(to_jsonb(n) order by n.infra desc, n.hours desc, n.node), '[]')
                from (
                    select
                        l.node, count(*) as failures, count(*) filter (where l.failure_kind = 'infra') as infra,
                        count(*) filter (where l.refund = 1) as refunds, coalesce(sum(l.hours), 0) as hours
                    from ledger as l where l.is_failure and l.node is not null
                    group by 1 order by 3 desc, 5 desc, 1 limit 10
                ) as n),
            'refunds', (
                select coalesce(jsonb_agg(to_jsonb(r) order by r.n desc, r.dag_id, r.task_id), '[]')
                from (
                    select
                        l.dag_id, l.task_id, count(*) filter (where l.refund = 1) as n,
                        count(*) filter (where l.is_refused) as refused
                    from ledger as l where l.refund = 1 or l.is_refused
                    group by 1, 2 order by 3 desc, 1, 2 limit 10
                ) as r),
            'kept', (
                select coalesce(jsonb_agg(to_jsonb(k) order by k.hours desc, k.dag_id, k.task_id), '[]')
                from (
                    select l.dag_id, l.task_id, count(*) as n, coalesce(sum(l.hours), 0) as hours
                    from ledger as l where l.is_kept
                    group by 1, 2 order by 4 desc, 1, 2 limit 10
                ) as k))
    );
end
$$;
comment on function settle.report_figures(integer) is 'The figures of podsettle report, from the ledger.';
