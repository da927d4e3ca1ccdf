-- Purpose: the whole settle rule (docs/design.md): what evidence makes of a task instance. Every writer asks it.
-- Arguments: the task instance (p_state, p_try_number, p_max_tries, p_retries); whether the evidence is of its
--   current attempt; the evidence (p_verdict success|failed|reschedule|not_final|clear, p_failure_kind, p_silence
--   null|unripe|ripe); refunds used in this life, and their cap; the last settlement while it is provisional.
-- Returns: one settle.decision; state null: nothing is written. Pure: it reads no table and no clock.
create or replace function settle.decide(
    p_state text,
    p_try_number integer,
    p_max_tries integer,
    p_retries integer,
    p_same_attempt boolean,
    p_verdict text,
    p_failure_kind text,
    p_silence text,
    p_refunds_used integer,
    p_refund_cap integer,
    p_provisional boolean,
    p_provisional_kind text,
    p_provisional_refunded boolean
)
returns settle.decision
language plpgsql
immutable
parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    d settle.decision;
    v_settled_provisionally constant boolean := p_state in ('up_for_retry', 'failed') and p_provisional;
begin
    d.refund := 0;
    d.refunds_used := p_refunds_used;
    d.max_tries := p_max_tries;
    d.provisional := false;
    d.backoff := 'none';

    if p_verdict = 'clear' then
        -- A life begins: the retries that the task was made with, on top of the attempts that it already had.
        if p_state = 'none' then
            d.disposition := 'duplicate';
            return d;
        end if;
        d.disposition := 'settled';
        d.state := 'none';
        d.max_tries := coalesce(p_try_number + p_retries, greatest(p_max_tries, p_try_number));
        d.refunds_used := 0;
        return d;
    end if;

    if not p_same_attempt then
        d.disposition := 'stale';
        return d;
    end if;

    if v_settled_provisionally and p_silence is null then
        if p_verdict = 'success' then
            d.disposition := 'overrode';
            d.state := 'success';
            if p_provisional_refunded then
                d.refund := -1;
                d.max_tries := p_max_tries - 1;
                d.refunds_used := greatest(p_refunds_used - 1, 0);
            end if;
            return d;
        end if;
        if p_verdict = 'failed' and p_failure_kind is not distinct from p_provisional_kind then
            d.disposition := 'confirmed';
            d.state := p_state;
            return d;
        end if;
    end if;

    if p_state not in ('queued', 'running') then
        d.disposition := 'duplicate';
        return d;
    end if;
    if p_silence = 'unripe' then
        d.disposition := 'suspected';
        return d;
    end if;
    if p_verdict = 'not_final' then
        d.disposition := 'not_final';
        return d;
    end if;

    d.disposition := 'settled';
    d.provisional := p_silence is not distinct from 'ripe';
    case p_verdict
        when 'success' then
            d.state := 'success';
        when 'reschedule' then
            d.state := 'up_for_reschedule';
            d.backoff := 'reschedule';
        when 'failed' then
            if p_failure_kind = 'manual' then
                d.state := 'failed';
            elsif p_failure_kind = 'infra' and p_refunds_used < p_refund_cap then
                d.state := 'up_for_retry';
                d.max_tries := p_max_tries + 1;
                d.refund := 1;
                d.refunds_used := p_refunds_used + 1;
                d.backoff := 'infra';
            elsif p_try_number <= p_max_tries then
                d.state := 'up_for_retry';
                d.backoff := case when p_failure_kind = 'infra' then 'infra' else 'retry' end;
            else
                d.state := 'failed';
            end if;
    end case;
    return d;
end
$$;
comment on function settle.decide(
    text, integer, integer, integer, boolean, text, text, text, integer, integer, boolean, text, boolean
) is 'The settle rule: pure, immutable, the one place where a transition is decided.';

-- Purpose: one sentence that says why a decision came out as it did, for psql, logs and the ledger. Pure.
create or replace function settle.decision_text(
    p_decision settle.decision,
    p_state text,
    p_try_number integer,
    p_evidence settle.evidence,
    p_refund_cap integer,
    p_attempt_id text
)
returns text
language plpgsql
immutable
parallel safe
set search_path = pg_catalog, pg_temp
as $$
declare
    v_failure constant text := format(
        '%s failure (%s)', coalesce((p_evidence).failure_kind, 'unclassified'), coalesce((p_evidence).reason, 'no reason given'));
begin
    case (p_decision).disposition
        when 'stale' then
            return case
                when (p_evidence).try_number is distinct from p_try_number
                    then format('evidence of try %s, the task instance is at try %s', (p_evidence).try_number, p_try_number)
                when p_attempt_id is not null
                    then format('evidence of another attempt with the same try_number %s', p_try_number)
                else 'the pod was created before the task instance was last queued'
            end;
        when 'duplicate' then
            return format('the task instance is already %s', p_state);
        when 'suspected' then
            return format('a suspicion (%s): settled only after its grace', coalesce((p_evidence).reason, (p_evidence).silence));
        when 'not_final' then
            return coalesce('not final yet: ' || (p_evidence).reason, 'not final yet');
        when 'overrode' then
            return format('a success of the same attempt replaces its provisional settlement%s',
                case when (p_decision).refund = -1
                    then format('; its refund is taken back, max_tries now %s', (p_decision).max_tries) else '' end);
        when 'confirmed' then
            return format('%s proves what was settled provisionally', v_failure);
        else null;
    end case;
    return case
        when (p_evidence).verdict = 'clear'
            then format('cleared; max_tries now %s, refunds start again at 0', (p_decision).max_tries)
        when (p_evidence).verdict = 'success'
            then format('attempt %s succeeded%s', p_try_number, case when (p_evidence).from_record then ' (record)' else '' end)
        when (p_evidence).verdict = 'reschedule'
            then format('attempt %s asks to be run again at %s', p_try_number,
                to_char((p_evidence).reschedule_at at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'))
        when (p_evidence).failure_kind = 'manual'
            then format('marked failed by a person%s', coalesce(': ' || (p_evidence).reason, ''))
        when (p_decision).refund = 1
            then format('%s refunded attempt %s; max_tries now %s (refund %s/%s), retry budget preserved',
                v_failure, p_try_number, (p_decision).max_tries, (p_decision).refunds_used, p_refund_cap)
        when (p_evidence).failure_kind = 'infra'
            then format('%s not refunded (%s); %s', v_failure,
                case when p_refund_cap = 0 then 'refunds are off, max_infra_refunds is 0'
                    else format('refund %s/%s already used', (p_decision).refunds_used, p_refund_cap) end,
                case when (p_decision).state = 'up_for_retry'
                    then format('try %s spent a real retry of %s', p_try_number, (p_decision).max_tries)
                    else format('no retry left after try %s, max_tries %s', p_try_number, (p_decision).max_tries) end)
        when (p_decision).state = 'up_for_retry'
            then format('%s; try %s of %s, will retry', v_failure, p_try_number, (p_decision).max_tries + 1)
        else format('%s; no retry left after try %s, max_tries %s', v_failure, p_try_number, (p_decision).max_tries)
    end;
end
$$;
comment on function settle.decision_text(settle.decision, text, integer, settle.evidence, integer, text) is
'The sentence that explains a decision.';
