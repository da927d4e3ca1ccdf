-- Purpose: the built-in failure rules, as rows. Replaced whenever this file changes; rows of origin operator are
-- kept.
-- Tables written: settle.failure_rule.
delete from settle.failure_rule where origin = 'podsettle';

insert into settle.failure_rule (
    name, priority, origin, description, pod_reason, pod_message,
    container_reason, container_message, container_message_not, exit_codes, own_memory_limit,
    condition_type, condition_before_end, in_deletion_window, init_failed, failure_kind, reason, silence
) values
(
    'oom-own-limit', 10, 'podsettle', 'the container was killed at its own memory limit',
    null, null, '^OOMKilled$', null, null, '{[137,137]}', true, null, null, null, null,
    'application', '$container', null
),
(
    'deadline', 20, 'podsettle', 'the pod ran past its activeDeadlineSeconds',
    '^DeadlineExceeded$', null, null, null, null, null, null, null, null, null, null, 'timeout', '$pod', null
),
(
    'evicted-own-limit', 30, 'podsettle', 'evicted for a storage limit of its own',
    '^Evicted$',
    '(ephemeral.*storage usage exceeds|exceeded its local ephemeral storage limit|EmptyDir volume.*exceeds)',
    null, null, null, null, null, null, null, null, null, 'application', '$pod', null
),
(
    'evicted-node', 40, 'podsettle', 'evicted because the node ran short',
    '^Evicted$', '(node was low on resource|node had condition)',
    null, null, null, null, null, null, null, null, null, 'infra', '$pod', null
),
-- Before the condition: the kubelet stamps DisruptionTarget/TerminationByKubelet on a shutdown whose own reason
-- says more.
(
    'pod-reason', 45, 'podsettle', 'the node shut down, was lost, or refused the pod',
    '^(Terminated|Node ?Shutdown|Shutdown|Preempting|Node ?Lost|Node ?Affinity|Unexpected ?Admission ?Error'
    '|Topology ?Affinity ?Error|OutOf.+|NodePorts|NodeName|TaintToleration)$',
    null, null, null, null, null, null, null, null, null, null, 'infra', '$pod', null
),
(
    'disruption', 50, 'podsettle', 'the platform was disrupting the pod before its container ended',
    null, null, null, null, null, null, null,
    '^(DisruptionTarget|TerminationTarget)$', true, null, null, 'infra', '$condition', null
),
(
    'deleted', 70, 'podsettle', 'the pod was deleted while its container ran',
    null, null, null, null, null, null, null, null, null, true, null, 'infra', 'PodDeleted', null
),
(
    'runtime-lost', 80, 'podsettle', 'the container runtime lost the container (node reboot or runtime restart)',
    null, null, '^Unknown$', null, null, '{[255,255]}', null, null, null, null, null, 'infra', '$container', null
),
(
    'bad-command', 90, 'podsettle', 'the command or its directory cannot be run',
    null, null, '^(StartError|ContainerCannotRun)$',
    '(executable file not found|exec: .*no such file or directory|chdir to cwd .*no such file or directory'
    '|not a directory|permission denied)',
    '(namespace path|/proc/|context deadline exceeded)',
    null, null, null, null, null, null, 'application', '$container', null
),
(
    'exit-code', 100, 'podsettle', 'the container ended by itself with an error',
    null, null, '^Error$', null, null, '{[1,136],[138,142],[144,255]}',
    null, null, null, null, null, 'application', '$container', null
),
(
    'no-record', 900, 'podsettle', 'exit 0 without a record is not success',
    null, null, '^Completed$', null, null, '{[0,0]}', null, null, null, null, null, null, 'NoRecord', 'no_record'
),
(
    'no-record-other', 905, 'podsettle', 'exit 0 without a record is not success',
    null, null, null, null, null, '{[0,0]}', null, null, null, null, null, null, '$container', 'no_record'
),
(
    'unproven', 990, 'podsettle', 'nothing proves a kind',
    null, null, null, null, null, null, null, null, null, null, null, null, '$best', null
);

insert into settle.failure_rule (
    name, priority, origin, applies_to, description, phase, container_reason, failure_kind, reason, silence
) values (
    'never-starts', 10, 'podsettle', 'pending', 'the pod waits for something that does not heal by itself', '^Pending$',
    '^(ImagePullBackOff|ErrImagePull|InvalidImageName|ErrImageNeverPull|ImageInspectError|RegistryUnavailable'
    '|CreateContainerConfigError|CreateContainerError|RunContainerError|OOMKilled|CrashLoopBackOff)$',
    'infra', '$best', 'pending'
);

insert into settle.failure_rule (
    name, priority, origin, description, container_state, init_failed, failure_kind, reason
) values (
    'init-failed', 950, 'podsettle', 'an init container failed, the task never started',
    '^(waiting|absent)$', true, null, 'InitContainerFailed'
);
