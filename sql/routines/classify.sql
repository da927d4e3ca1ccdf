-- Purpose: what one pod says, from the facts that the reconciler read off it and the rows of settle.failure_rule.
-- Arguments: p_pod, one object as settle.settle_pods takes them (docs/sql.md); absent keys count as null.
-- Returns: one settle.verdict; final false: nothing may be settled from it yet.
-- Raises: ST006 for facts that are no object or hold a value of a wrong type.
-- Tables written: none. Locks: none. Clock: none, times of the pod are compared with each other only.
create or replace function settle.classify(p_pod jsonb)
returns settle.verdict
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    c_slack constant interval := interval '3 s';  -- node clock against control plane, and whole seconds
    v settle.verdict;
    v_rule settle.failure_rule;
    v_container jsonb := p_pod -> 'container';
    v_record jsonb := nullif(p_pod -> 'record', 'null');
    v_init jsonb := nullif(p_pod -> 'init', 'null');
    v_conditions jsonb := case when jsonb_typeof(p_pod -> 'conditions') = 'array' then p_pod -> 'conditions' else '[]' end;
    v_phase text := p_pod ->> 'phase';
    v_state text := coalesce(v_container ->> 'state', 'absent');
    v_container_reason text := nullif(v_container ->> 'reason', '');
    v_pod_reason text := nullif(p_pod ->> 'pod_reason', '');
    v_exit_code integer;
    v_finished_at timestamptz;
    v_deletion_at timestamptz;
    v_in_window boolean;
    v_init_failed boolean;
    v_disruption text;
begin
    if jsonb_typeof(p_pod) is distinct from 'object' then
        raise exception 'pod facts are no JSON object but %', coalesce(jsonb_typeof(p_pod), 'null')
            using errcode = 'ST006', hint = 'Pass one object a pod, as podsettle explain --output json prints under "facts".';
    end if;
    begin
        v_exit_code := (v_container ->> 'exit_code')::integer;
        v_finished_at := (v_container ->> 'finished_at')::timestamptz;
        v_deletion_at := (p_pod ->> 'deletion_at')::timestamptz;
        v.reschedule_at := (v_record ->> 'reschedule_at')::timestamptz;
        v.exit_code := coalesce((v_record ->> 'exit_code')::integer, v_exit_code);
        v_in_window := v_deletion_at is not null and (
            v_finished_at is null
            -- The kubelet sets the pod's own grace to 0 when it finishes a pod that a finalizer holds.
            or v_finished_at >= v_deletion_at - c_slack - make_interval(secs => greatest(
                (p_pod ->> 'deletion_grace_seconds')::integer,
                coalesce((p_pod ->> 'termination_grace_seconds')::integer, 30))));
    exception
        when data_exception then
            raise exception 'pod facts of % hold a value of a wrong type: %', coalesce(p_pod ->> 'pod', '?'), sqlerrm
                using errcode = 'ST006', hint = 'Times are RFC 3339 with a zone, exit codes and graces whole numbers.';
    end;
    v_init_failed := coalesce(v_init ->> 'state' = 'terminated', false);
    select coalesce(c.condition ->> 'reason', c.condition ->> 'type') into v_disruption
    from jsonb_array_elements(v_conditions) as c (condition)
    where c.condition ->> 'type' in ('DisruptionTarget', 'TerminationTarget') and c.condition ->> 'status' = 'True'
    limit 1;
    v.from_record := false;

    v.final := (v_state = 'terminated' and not coalesce((p_pod ->> 'restarts')::boolean, false))
        or coalesce(v_phase in ('Failed', 'Succeeded'), false);

    if not v.final then
        v.reason := case
            when v_disruption is not null then v_disruption
            when v_deletion_at is not null then coalesce((
                -- What the pod itself names as its end (NodeLost) says more than that it is being deleted.
                select v_pod_reason
                from settle.failure_rule as r
                where r.enabled and r.failure_kind = 'infra' and r.reason = '$pod' and r.pod_message is null
                    and v_pod_reason ~* r.pod_reason
                limit 1), 'PodDeleted')
            when v_state = 'waiting' and coalesce(v_container_reason, 'PodInitializing') = 'PodInitializing'
                then coalesce(v_init ->> 'reason', v_container_reason)
            when v_state = 'waiting' then v_container_reason
            when v_state = 'absent' then (
                select c.condition ->> 'reason'
                from jsonb_array_elements(v_conditions) as c (condition)
                where c.condition ->> 'type' = 'PodScheduled' and c.condition ->> 'status' = 'False'
                limit 1)
        end;
        if v_deletion_at is not null then
            v.silence := 'terminating';
            v.overdue_kind := 'infra';
            v.overdue_reason := v.reason;
            v.rule := 'terminating';
            v.why := 'the pod is being deleted and has not ended yet';
            return v;
        end if;
    end if;

    if v.final and v_record is not null then
        v.from_record := true;
        v.verdict := v_record ->> 'outcome';
        v.rule := 'record';
        v.why := format('the record says %s', v.verdict);
        if v.verdict <> 'failed' then
            return v;
        end if;
        v.failure_kind := coalesce(v_record ->> 'failure_kind', 'application');
        v.reason := coalesce(nullif(v_record ->> 'reason', ''), nullif(v_container_reason, 'Completed'), 'Error');
        -- Only an agent that the platform kills writes a bare "failed" with one of these codes.
        if v_record ->> 'failure_kind' is not null
            or coalesce(v.exit_code not in (137, 143, 255), true)
        then
            return v;
        end if;
    end if;

    select r.* into v_rule
    from settle.failure_rule as r
    where r.enabled
        and r.applies_to = case when v.final then 'final' else 'pending' end
        and (r.phase is null or v_phase ~ r.phase)
        and (r.pod_reason is null or v_pod_reason ~* r.pod_reason)
        and (r.pod_message is null or p_pod ->> 'pod_message' ~* r.pod_message)
        and (r.container_state is null or v_state ~ r.container_state)
        -- A pod that waits says why in the reason chosen above, which may be an init container's.
        and (r.container_reason is null or case when v.final then v_container_reason else v.reason end ~ r.container_reason)
        and (r.container_message is null or v_container ->> 'message' ~* r.container_message)
        and (r.container_message_not is null or coalesce(v_container ->> 'message', '') !~* r.container_message_not)
        and (r.exit_codes is null or r.exit_codes @> v_exit_code)
        and (r.own_memory_limit is null
            or r.own_memory_limit = coalesce((v_container ->> 'own_memory_limit')::boolean, false))
        and (r.in_deletion_window is null or r.in_deletion_window = v_in_window)
        and (r.init_failed is null or r.init_failed = v_init_failed)
        and (r.condition_type is null or exists (
            select
            from jsonb_array_elements(v_conditions) as c (condition)
            where c.condition ->> 'type' ~ r.condition_type
                and c.condition ->> 'status' = coalesce(r.condition_status, 'True')
                and (r.condition_reason is null or c.condition ->> 'reason' ~ r.condition_reason)
                and (not coalesce(r.condition_before_end, false)
                    or v_finished_at is null
                    or c.condition ->> 'at' is null
                    or v_finished_at >= (c.condition ->> 'at')::timestamptz - c_slack)))
    order by r.priority, r.name
    limit 1;

    if v.from_record then
        if v_rule.failure_kind is distinct from 'infra' then
            return v;
        end if;
        v.why := format('the record says failed with exit code %s, while the platform was ending the pod', v.exit_code);
    elsif v_rule.name is null then
        v.why := case when v.final
            then 'no rule matches: the built-in catch-all is disabled'
            else 'the task container has not ended' end;
        if not v.final then
            return v;
        end if;
    else
        v.why := v_rule.description;
    end if;

    if v.final then
        v.verdict := 'failed';
        v.failure_kind := v_rule.failure_kind;
        v.silence := v_rule.silence;
    else
        v.silence := v_rule.silence;
        v.overdue_kind := v_rule.failure_kind;
    end if;
    v.rule := v_rule.name;
    v.reason := coalesce(
        case v_rule.reason
            when '$pod' then v_pod_reason
            when '$container' then v_container_reason
            when '$init' then v_init ->> 'reason'
            when '$condition' then (
                select coalesce(c.condition ->> 'reason', c.condition ->> 'type')
                from jsonb_array_elements(v_conditions) as c (condition)
                where c.condition ->> 'type' ~ v_rule.condition_type
                    and c.condition ->> 'status' = coalesce(v_rule.condition_status, 'True')
                    and (v_rule.condition_reason is null or c.condition ->> 'reason' ~ v_rule.condition_reason)
                limit 1)
            when '$best' then null
            else v_rule.reason
        end,
        case when not v.final then v.reason end,
        v_pod_reason,
        case when v_state = 'terminated' then v_container_reason end,
        'NoContainerStatus');
    if not v.final then
        v.overdue_reason := v.reason;
    elsif v.silence = 'no_record' and settle.setting_value('trust_exit_zero')::boolean then
        v.verdict := 'success';
        v.failure_kind := null;
        v.reason := null;
        v.silence := null;
        v.rule := 'trust-exit-zero';
        v.why := 'exit 0, no sign of disruption, and setting trust_exit_zero is true';
    end if;
    return v;
end
$$;
comment on function settle.classify(jsonb) is 'What one pod says: verdict, kind, reason, and the rule that gave them.';
