-- Purpose: held evidence: when a pod with our finalizer may go, and how long a deleted pod of nobody is kept.

insert into settle.setting (name, value, kind, description) values
('unmatched_after', '10 min', 'interval', 'how long a deleted pod of no known task is held before it is let go');

create table settle.stranger (
    uid text not null,
    namespace text not null,
    pod text not null,
    first_seen_at timestamptz not null,
    last_seen_at timestamptz not null,
    constraint stranger_pkey primary key (uid),
    constraint stranger_order_check check (first_seen_at <= last_seen_at)
);
comment on table settle.stranger is
'Pods of no known task that are being deleted and wait for us, since when: no namespace may hang on podsettle.';

alter type settle.outcome add attribute settled_at timestamptz;
alter type settle.settled_pod add attribute release boolean, add attribute settled_age interval;
comment on type settle.settled_pod is
'What became of one pod, or of one whose absence was judged. release: its evidence is used, or nobody''s: it may go.
settled_age: how long ago its task instance was last settled.';
