-- A host that only the tests have, as its owner would make it before podsettle is installed.
do $$
begin
    create role settle_owner nologin;
exception
    when duplicate_object or unique_violation then null;
end
$$;
create schema app;
create type app.job_status as enum ('new', 'waiting', 'working', 'done', 'broken', 'again', 'later');
create table app.jobs (
    job_id uuid primary key default gen_random_uuid(),
    pipeline varchar(250) not null,
    run varchar(250) not null,
    step varchar(250) not null,
    part int not null default -1,
    status app.job_status not null default 'new',
    attempt_no int not null default 0,
    last_retried_attempt int not null default 0,
    own_retries int not null default 0,
    wait_seconds int not null default 300,
    enqueued_at timestamptz,
    began_at timestamptz,
    finished_at timestamptz,
    not_before timestamptz,
    unique (pipeline, run, step, part)
);
create table app.job_history (
    job_id uuid not null,
    attempt_no int not null,
    kind text,
    ended_at timestamptz not null,
    unique (job_id, attempt_no)
);
grant usage on schema app to settle_owner;
grant select, update on app.jobs to settle_owner;
grant select, insert on app.job_history to settle_owner;
