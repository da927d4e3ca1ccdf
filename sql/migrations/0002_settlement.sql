-- Purpose: settings, rules, passes, the ledger of settlements and the outbox; the composite types that routines
-- exchange.

create table settle.setting (
    name text not null,
    value text not null,
    kind text not null,
    description text not null,
    constraint setting_pkey primary key (name),
    constraint setting_kind_check check (kind in ('count', 'interval', 'flag')),
    -- The cast is the check: a value that is none of its kind cannot be stored.
    constraint setting_value_check check (
        case kind
            when 'count' then value ~ '^\d{1,6}$'
            when 'interval' then value::interval >= interval '0'
            when 'flag' then value in ('true', 'false')
        end
    )
);
comment on table settle.setting is 'One row a setting; change value, the check refuses what does not fit the kind.';

insert into settle.setting (name, value, kind, description) values
('max_infra_refunds', '3', 'count', 'refunds of infra failures per life of a task instance; 0 turns refunds off'),
('infra_retry_delay', '10 s', 'interval', 'shortest wait before an infra retry'),
('infra_retry_jitter', '30 s', 'interval', 'deterministic spread on top of infra_retry_delay'),
('trust_exit_zero', 'false', 'flag', 'exit 0 with no record and no sign of disruption is success'),
('absent_after', '60 s', 'interval', 'grace before a dispatched task instance with no pod is settled'),
('pending_after', '10 min', 'interval', 'grace before a pod that cannot start is settled'),
('terminating_after', '5 min', 'interval', 'grace beyond its own before a stuck Terminating pod is settled'),
('no_record_after', '60 s', 'interval', 'grace before exit 0 with no record is settled'),
('pass_gap', '150 s', 'interval', 'longest time between two complete passes that counts towards a grace');

create table settle.refund_policy (
    dag_id text not null,
    task_id text,
    max_infra_refunds integer not null,
    constraint refund_policy_key unique nulls not distinct (dag_id, task_id),
    constraint refund_policy_cap_check check (max_infra_refunds between 0 and 999999)
);
comment on table settle.refund_policy is
'The refund cap of one DAG (task_id null) or one task; the closest row wins over setting max_infra_refunds.';

create table settle.failure_rule (
    name text not null,
    priority integer not null,
    origin text not null default 'operator',
    enabled boolean not null default true,
    applies_to text not null default 'final',
    description text not null default '',
    phase text,
    pod_reason text,
    pod_message text,
    container_state text,
    container_reason text,
    container_message text,
    container_message_not text,
    exit_codes int4multirange,
    own_memory_limit boolean,
    condition_type text,
    condition_status text,
    condition_reason text,
    condition_before_end boolean,
    in_deletion_window boolean,
    init_failed boolean,
    failure_kind text,
    reason text,
    silence text,
    constraint failure_rule_pkey primary key (name),
    constraint failure_rule_origin_check check (origin in ('podsettle', 'operator')),
    constraint failure_rule_applies_to_check check (applies_to in ('final', 'pending')),
    constraint failure_rule_kind_check check (failure_kind in ('infra', 'application', 'timeout')),
    constraint failure_rule_silence_check check (silence in ('no_record', 'pending')),
    constraint failure_rule_pending_check check ((applies_to = 'pending') = (silence is not distinct from 'pending')),
    constraint failure_rule_condition_check check (
        condition_type is not null
        or (condition_status is null and condition_reason is null and condition_before_end is null)
    ),
    -- Matching against '' compiles each pattern: one that is no regular expression cannot be stored.
    constraint failure_rule_patterns_check check (
        '' ~ coalesce(phase, '') is not null
        and '' ~* coalesce(pod_reason, '') is not null
        and '' ~* coalesce(pod_message, '') is not null
        and '' ~ coalesce(container_state, '') is not null
        and '' ~ coalesce(container_reason, '') is not null
        and '' ~* coalesce(container_message, '') is not null
        and '' ~* coalesce(container_message_not, '') is not null
        and '' ~ coalesce(condition_type, '') is not null
        and '' ~ coalesce(condition_reason, '') is not null
    )
);
comment on table settle.failure_rule is
'How pod status becomes a failure kind: the first enabled row by priority whose every non-null column matches.
Text columns are regular expressions. Rows of origin podsettle are replaced at install; add rows of your own.';
comment on column settle.failure_rule.condition_before_end is
'true: the condition counts only if the container did not end by itself before it (3 s of slack)';
comment on column settle.failure_rule.in_deletion_window is
'true: deletionTimestamp is set and the container ended inside its grace, or never reported an end';
comment on column settle.failure_rule.reason is
'a literal token, or $pod, $container, $condition, $init for what the pod says, or $best for the best of them';
comment on column settle.failure_rule.silence is
'no_record, pending: what matches is a suspicion, settled only after its grace';

-- Operators keep their own rows; ours change only with a release.
alter table settle.failure_rule enable row level security;
create policy failure_rule_read on settle.failure_rule for select using (true);
create policy failure_rule_operator on settle.failure_rule for all to settle_operator
using (origin = 'operator') with check (origin = 'operator');

create table settle.pass (
    id bigint generated always as identity,
    opened_at timestamptz not null default clock_timestamp(),
    closed_at timestamptz,
    namespace text,
    profile text not null,
    source text not null,
    complete boolean,
    counts jsonb not null default '{}',
    opened_by text not null default session_user,
    constraint pass_pkey primary key (id),
    constraint pass_source_check check (source in ('api', 'files')),
    constraint pass_closed_check check ((closed_at is null) = (complete is null)),
    constraint pass_order_check check (closed_at >= opened_at)
);
comment on table settle.pass is 'One run of the reconciler; namespace null means all namespaces.';

create table settle.settlement (
    id bigint generated always as identity,
    settled_at timestamptz not null default now(),
    disposition text not null,
    task_key uuid not null,
    task_instance_id uuid not null,
    dag_id text not null,
    run_id text not null,
    task_id text not null,
    map_index integer not null,
    try_number integer not null,
    attempt_id text,
    previous_state text not null,
    state text not null,
    verdict text not null,
    failure_kind text,
    reason text,
    exit_code integer,
    next_try_at timestamptz,
    refund smallint not null default 0,
    refunds_used integer not null,
    refund_cap integer not null,
    previous_max_tries integer not null,
    max_tries integer not null,
    provisional boolean not null default false,
    from_record boolean not null default false,
    rule text,
    source text not null,
    actor text not null default session_user,
    pass_id bigint,
    namespace text,
    pod text,
    node text,
    evidence jsonb not null default '{}',
    why text not null,
    constraint settlement_pkey primary key (id),
    constraint settlement_pass_fkey foreign key (pass_id) references settle.pass (id),
    constraint settlement_disposition_check check (disposition in ('settled', 'overrode', 'confirmed')),
    constraint settlement_source_check check (source in ('pass', 'report', 'person')),
    constraint settlement_verdict_check check (verdict in ('success', 'failed', 'reschedule', 'clear')),
    constraint settlement_kind_check check (
        failure_kind is null
        or (verdict = 'failed' and failure_kind in ('infra', 'application', 'timeout', 'manual'))
    ),
    constraint settlement_refund_check check (
        case refund
            when 1
                then
                    failure_kind is not distinct from 'infra'
                    and state = 'up_for_retry'
                    and max_tries = previous_max_tries + 1
            when 0 then true
            when -1 then disposition = 'overrode'
        end
    ),
    constraint settlement_cap_check check (refund <> 1 or refunds_used <= refund_cap),
    constraint settlement_state_check check (
        case disposition
            when 'confirmed' then state = previous_state and refund = 0
            when 'overrode' then state = 'success' and previous_state in ('up_for_retry', 'failed')
            when 'settled' then state <> previous_state
        end
    ),
    constraint settlement_provisional_check check (not provisional or source = 'pass')
);
comment on table settle.settlement is
'The append-only ledger: a row a transition (settled, overrode), and one where proof confirmed a provisional one.';
comment on column settle.settlement.task_key is 'settle.task_key(): stays when a host changes the id';
comment on column settle.settlement.refunds_used is 'refunds of this life of the task instance, this row included';

-- The newest row of a task instance is read for every settle: this index answers it alone.
create index settlement_task_key_idx on settle.settlement (task_key, id);
create index settlement_settled_at_idx on settle.settlement (settled_at);

create table settle.listener (
    name text not null,
    enabled boolean not null default true,
    registered_at timestamptz not null default now(),
    constraint listener_pkey primary key (name),
    constraint listener_name_check check (name ~ '^[a-z0-9][a-z0-9_.-]{0,62}$')
);
comment on table settle.listener is 'Who is told of each transition: one outbox row each.';

create table settle.outbox (
    id bigint generated always as identity,
    settlement_id bigint not null,
    listener text not null,
    created_at timestamptz not null default now(),
    constraint outbox_pkey primary key (id),
    constraint outbox_once_key unique (settlement_id, listener),
    constraint outbox_settlement_fkey foreign key (settlement_id) references settle.settlement (id),
    constraint outbox_listener_fkey foreign key (listener) references settle.listener (name)
);
comment on table settle.outbox is 'Transitions to be told to listeners, written in the transaction that made them.';

create type settle.verdict as (
    final boolean,
    verdict text,
    from_record boolean,
    failure_kind text,
    reason text,
    rule text,
    exit_code integer,
    reschedule_at timestamptz,
    silence text,
    overdue_kind text,
    overdue_reason text,
    why text
);
comment on type settle.verdict is
'What one pod says. silence: what it rests on when it is only a suspicion (no_record, pending, terminating).
overdue_*: what a pod that is not final becomes once that suspicion ripened.';

create type settle.evidence as (
    ord integer,
    task_instance_id uuid,
    try_number integer,
    attempt_id text,
    pod_created_at timestamptz,
    verdict text,
    failure_kind text,
    reason text,
    exit_code integer,
    reschedule_at timestamptz,
    from_record boolean,
    silence text,
    ripe boolean,
    rule text,
    namespace text,
    pod text,
    node text,
    facts jsonb
);
comment on type settle.evidence is
'What one pod, report or person says about one attempt, matched to a task instance.
try_number null: whichever is current.
silence: it is only a suspicion; ripe: one that outlived its grace.';

create type settle.decision as (
    disposition text,
    state text,
    max_tries integer,
    refund smallint,
    refunds_used integer,
    provisional boolean,
    backoff text
);
comment on type settle.decision is 'What settle.decide() makes of evidence; state null: nothing is written.';

create type settle.outcome as (
    ord integer,
    task_instance_id uuid,
    try_number integer,
    disposition text,
    previous_state text,
    state text,
    previous_max_tries integer,
    max_tries integer,
    refund smallint,
    refunds_used integer,
    refund_cap integer,
    settlement_id bigint,
    why text
);
comment on type settle.outcome is 'What became of one piece of evidence.';

create type settle.matched_pod as (
    ord integer,
    pod text,
    namespace text,
    node text,
    task_instance_id uuid,
    try_number integer,
    attempt_id text,
    created_at timestamptz,
    verdict settle.verdict,
    problem text,
    facts jsonb
);
comment on type settle.matched_pod is 'One pod, classified and matched; problem: why it belongs to no task instance.';
