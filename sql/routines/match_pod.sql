-- Purpose: classifies one pod and finds its task instance, by id or (profile airflow) by its four names.
-- Arguments: p_ord its place in the page; p_facts the pod facts (docs/sql.md).
-- Returns: one settle.matched_pod; problem says why it belongs to no task instance. Raises: ST006 as settle.classify.
-- Tables written: none. Locks: none.
create or replace function settle.match_pod(p_ord integer, p_facts jsonb)
returns settle.matched_pod
language plpgsql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
declare
    m settle.matched_pod;
    v_identity jsonb := p_facts -> 'identity';
begin
    m.ord := p_ord;
    m.verdict := settle.classify(p_facts);
    m.facts := p_facts - 'identity' - 'pod' - 'namespace' - 'node';
    m.pod := p_facts ->> 'pod';
    m.namespace := p_facts ->> 'namespace';
    m.node := p_facts ->> 'node';
    m.attempt_id := v_identity ->> 'attempt_id';
    m.problem := v_identity ->> 'problem';
    begin
        m.created_at := (p_facts ->> 'created_at')::timestamptz;
        m.try_number := (v_identity ->> 'try_number')::integer;
        m.task_instance_id := (v_identity ->> 'task_instance_id')::uuid;
        if m.problem is not null then
            return m;
        end if;
        if m.try_number is null then
            m.problem := 'the pod names no try_number';
        elsif m.task_instance_id is not null then
            perform from settle.task_instance as t where t.id = m.task_instance_id;
            if not found then
                m.problem := format('no task instance %s in this database', m.task_instance_id);
            end if;
        elsif v_identity ->> 'task_id' is not null then
            select t.id into m.task_instance_id
            from settle.task_instance as t
            where t.dag_id = v_identity ->> 'dag_id'
                and t.run_id = v_identity ->> 'run_id'
                and t.task_id = v_identity ->> 'task_id'
                and t.map_index = coalesce((v_identity ->> 'map_index')::integer, -1);
            if not found then
                m.problem := format('no task instance %s/%s/%s[%s] in this database', v_identity ->> 'dag_id',
                    v_identity ->> 'run_id', v_identity ->> 'task_id', coalesce(v_identity ->> 'map_index', '-1'));
            end if;
        else
            m.problem := 'the pod names no task instance';
        end if;
    exception
        when data_exception then
            raise exception 'identity of pod % holds a value of a wrong type: %', coalesce(m.pod, '?'), sqlerrm
                using errcode = 'ST006', hint = 'task_instance_id is a UUID, try_number and map_index are integers.';
    end;
    return m;
end
$$;
comment on function settle.match_pod(integer, jsonb) is 'One pod, classified and matched to its task instance.';
