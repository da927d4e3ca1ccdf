-- Purpose: doubt and time: suspicions, the lease of a pass, the measured clock, what agents push.

create table settle.suspicion (
    task_instance_id uuid not null,
    cause text not null,
    try_number integer not null,
    attempt_id text,
    failure_kind text,
    reason text not null,
    rule text,
    exit_code integer,
    namespace text,
    pod text,
    node text,
    own_grace interval not null default interval '0',
    evidence jsonb not null default '{}',
    first_seen_at timestamptz not null,
    last_seen_at timestamptz not null,
    passes integer not null default 0,
    counted_at timestamptz,
    age interval not null default interval '0',
    seen_by bigint[] not null default '{}',
    constraint suspicion_pkey primary key (task_instance_id),
    constraint suspicion_cause_check check (cause in ('absent', 'pending', 'terminating', 'no_record')),
    constraint suspicion_counted_check check ((passes = 0) = (counted_at is null)),
    constraint suspicion_order_check check (first_seen_at <= last_seen_at and age >= interval '0')
);
comment on table settle.suspicion is
'What rests on silence: settled only once complete passes saw it for longer than its grace.';
comment on column settle.suspicion.own_grace is 'what the pod itself may take on top of the setting';
comment on column settle.suspicion.age is
'time between complete passes that saw it, as far as their gaps are no longer than setting pass_gap';
comment on column settle.suspicion.seen_by is 'the open passes that saw it: only these count it';
comment on column settle.suspicion.counted_at is 'when the last complete pass that saw it was closed';

-- The view of what a late success would still replace reads these alone.
create index settlement_provisional_idx on settle.settlement (id) where provisional;

create table settle.lease (
    scope text not null,
    pass_id bigint not null,
    until timestamptz not null,
    constraint lease_pkey primary key (scope),
    constraint lease_pass_fkey foreign key (pass_id) references settle.pass (id)
);
comment on table settle.lease is
'Which pass lists a scope now, so that a second one waits. It saves work; correctness does not rest on it.';

alter table settle.pass add column clock_offset interval;
comment on column settle.pass.clock_offset is 'the API server''s clock minus the database''s, measured once a pass';

create table settle.pushed (
    attempt_id text not null,
    key text not null,
    value jsonb not null,
    task_instance_id uuid not null,
    pushed_at timestamptz not null,
    constraint pushed_pkey primary key (attempt_id, key),
    constraint pushed_key_check check (length(key) between 1 and 250)
);
comment on table settle.pushed is 'What the agents of attempts pushed: return values, links, XComs.';

insert into settle.setting (name, value, kind, description) values
('pass_lease', '15 s', 'interval', 'how long a pass that lists the API keeps another one of its scope waiting'),
('clock_skew_warn', '5 s', 'interval', 'a larger difference between API server and database is reported'),
('judge_absence', 'true', 'flag', 'a dispatched task instance with no pod becomes a suspicion');

create type settle.settled_pod as (
    ord integer,
    pod text,
    namespace text,
    task_instance_id uuid,
    try_number integer,
    final boolean,
    verdict text,
    from_record boolean,
    failure_kind text,
    reason text,
    rule text,
    disposition text,
    previous_state text,
    state text,
    previous_max_tries integer,
    max_tries integer,
    refund smallint,
    settlement_id bigint,
    why text
);
comment on type settle.settled_pod is 'What became of one pod, or of one whose absence was judged.';
