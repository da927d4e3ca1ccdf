"""A real Kubernetes on this machine for the tests: started whole, and stopped without a trace.

    python tests/cluster/harness.py up [--nodes 2]    start it and leave it running
    python tests/cluster/harness.py kubeconfig        print the path of the administrator's kubeconfig
    python tests/cluster/harness.py kubectl ...       run the kubectl of the same version against it
    python tests/cluster/harness.py load              build the images and give them to every node
    python tests/cluster/harness.py postgres          start a Postgres that pods and this machine reach; print its DSN
    python tests/cluster/harness.py down              stop everything

etcd, kube-apiserver, kube-controller-manager, kube-scheduler, and for each node a containerd and a kubelet run in pid,
mount and network namespaces of their own (supervisor.py is process 1 there). One pair of virtual interfaces leads out.
Killing process 1 ends all of it; only the cgroups are then left to remove.

The service address of the API belongs to that network, so pods find the API as they do in any cluster, with no
kube-proxy. Other service addresses, and NetworkPolicies, have no effect here.

Needs root, and from Debian: containerd, runc, containernetworking-plugins, etcd-server, debootstrap, iproute2,
postgresql; and Go. With E2E_KUBECONFIG set, tests use that cluster (see External); with E2E_REUSE set,
the one that `up` left running.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import build
import images

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HERE = Path(__file__).parent
NAME = "podsettle-cluster"
# Only these two addresses are seen outside the cluster's own network.
OUTSIDE, INSIDE = "10.214.0.1", "10.214.0.2"
PODS, PODS_GATEWAY = "10.214.128.0/17", "10.214.128.1"
SERVICES, API_SERVICE = "10.213.0.0/24", "10.213.0.1"
NODES = ("node-a", "node-b")

T = TypeVar("T")


class ClusterError(Exception):
    """The cluster did not do what was asked; the message says what to look at."""


def wait_for(what: str, condition: Callable[[], T], *, timeout: float = 120) -> T:
    """Wait until a condition holds and return its value; fail with its name if it never does."""
    end = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise ClusterError(f"after {timeout:.0f} s still not: {what}")
        time.sleep(0.2)


class Cluster:
    """The cluster that this module starts; one at a time on a machine."""

    def __init__(self, folder: Path | None = None) -> None:
        """Name the cluster's folder; nothing is started yet."""
        chosen = os.environ.get("E2E_CLUSTER_DIR")
        self.folder = folder or Path(chosen or Path(tempfile.gettempdir()) / NAME)
        self.kubeconfig = self.folder / "admin.kubeconfig"
        self.owned = True
        self.outside = OUTSIDE
        self._postgres: str | None = None

    # The whole.

    def up(self, nodes: int = 1) -> None:
        """Start everything and wait until the nodes are ready."""
        if os.geteuid() != 0:
            raise ClusterError("only root can start the cluster; or set E2E_KUBECONFIG")
        self.down()
        programs = build.kubernetes()
        self.folder.mkdir(parents=True)
        self.folder.chmod(0o755)
        (self.folder / "bin").symlink_to(programs)
        (self.folder / "log").mkdir()
        self._enter()
        try:
            self._certificates()
            self._control_plane()
            for name in NODES[:nodes]:
                self.add_node(name)
        except BaseException:
            self.down(keep_logs=True)
            raise

    def down(self, *, keep_logs: bool = False) -> None:
        """Stop everything, whatever is left of it, and remove the folder."""
        pid = self.running()
        if pid:
            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        for top in _cgroups():
            _remove_cgroup(top)
        mine = f" {self.folder}/"
        wait_for(
            "mounts gone", lambda: mine not in Path("/proc/self/mounts").read_text(), timeout=30
        )
        if keep_logs and (self.folder / "log").is_dir():
            kept = self.folder.with_name(self.folder.name + "-failed-logs")
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(self.folder / "log", kept)
            print(f"cluster: logs kept in {kept}", file=sys.stderr)
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def running(self) -> int | None:
        """Return the process that holds the cluster together, if it lives."""
        try:
            state = json.loads((self.folder / "state.json").read_text())
            if _start_time(state["pid"]) == state["start_time"]:
                return int(state["pid"])
        except (FileNotFoundError, ValueError, KeyError):
            pass
        return None

    def restart(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """Stop one program and start it again with the same arguments."""
        self.stop(name, how)
        self.start_again(name)

    def stop(self, name: str, how: signal.Signals = signal.SIGTERM) -> int:
        """Stop one program, as in kube-apiserver or kubelet-node-b; return how it ended."""
        code = self._ask(do="stop", name=name, signal=int(how), timeout=60.0)["exit_code"]
        if code is None:
            raise ClusterError(f"{name} did not end within 60 s of {how.name}")
        return code

    def start_again(self, name: str) -> None:
        """Start a program that was stopped."""
        command = json.loads((self.folder / f"{name}.command").read_text())
        self._ask(do="start", **command)
        if name == "kube-apiserver":
            self._wait_api()

    def run(self, *argv: str, timeout: float = 600, check: bool = True) -> str:
        """Run a command inside the cluster's namespaces and return its output."""
        answer = self._ask(do="run", argv=argv, env={}, timeout=timeout)
        if check and answer["exit_code"] != 0:
            raise ClusterError(
                f"{' '.join(argv)} ended with {answer['exit_code']}: {answer['output']}"
            )
        return answer["output"]

    def kubectl(self, *arguments: str, data: str | None = None, check: bool = True) -> str:
        """Run kubectl as administrator and return what it printed."""
        return _kubectl(self.folder / "bin/kubectl", self.kubeconfig, arguments, data, check=check)

    # Parts.

    def add_node(self, name: str) -> None:
        """Start a containerd and a kubelet, and wait until the node is ready."""
        self._containerd(name)
        with tempfile.TemporaryDirectory(dir=self.folder) as work:
            self._load(("pause",), Path(work), [name])
        self._kubelet(name)
        self.wait_ready(name)

    def wait_ready(self, name: str) -> None:
        """Wait until the API says that a node is ready."""
        path = "-o=jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        wait_for(
            f"node {name} ready (see {self.folder}/log/kubelet-{name}.log)",
            lambda: self.kubectl("get", "node", name, path, check=False) == "True",
        )

    def lose_node(self, name: str) -> None:
        """End a node at once, as a power cut does: its kubelet, its runtime and every container."""
        self.stop(f"kubelet-{name}", signal.SIGKILL)
        self.stop(f"containerd-{name}", signal.SIGKILL)
        for top in _cgroups():
            for procs in (top / name).rglob("cgroup.procs"):
                for pid in procs.read_text().split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)

    def bring_back_node(self, name: str) -> None:
        """Start a lost node again, under its name, with nothing left of its pods."""
        for top in _cgroups():
            _remove_cgroup(top / name)
        self.start_again(f"containerd-{name}")
        self._wait_containerd(name)
        for sandbox in self._ctr(name, "containers", "ls", "-q").split():
            self._ctr(name, "tasks", "delete", "--force", sandbox, check=False)
            self._ctr(name, "containers", "delete", sandbox, check=False)
        for top in _cgroups():
            _make_cgroup(top / name)
        self.start_again(f"kubelet-{name}")
        self.wait_ready(name)

    def kill_container(self, node: str, container: str) -> None:
        """Send SIGKILL to every process of a container; the kubelet only sees that it ended."""
        self._ctr(node, "tasks", "kill", "--signal", "SIGKILL", "--all", container)

    def nodes(self) -> list[str]:
        """List the nodes that were started."""
        return [name for name in NODES if (self.folder / f"kubelet-{name}.command").exists()]

    def load(self, *names: str) -> None:
        """Build the named images and give them to every node."""
        with tempfile.TemporaryDirectory(dir=self.folder) as work:
            self._load(names, Path(work), self.nodes())

    def postgres(self) -> str:
        """Start a Postgres that pods and this machine reach at the same address; return its DSN."""
        if self._postgres is None:
            self._postgres = self._start_postgres()
        return self._postgres

    # How it is done.

    def _enter(self) -> None:
        """Start process 1 in new namespaces, and lay the one way out of them."""
        with (self.folder / "log/supervisor.log").open("w") as log:
            process = subprocess.Popen(
                [
                    *(
                        "unshare",
                        "--mount",
                        "--propagation",
                        "private",
                        "--pid",
                        "--net",
                        "--ipc",
                        "--uts",
                    ),
                    *("--fork", "--kill-child", "--mount-proc"),
                    *(sys.executable, HERE / "supervisor.py", self.folder),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        state = {"pid": process.pid, "start_time": _start_time(process.pid)}
        (self.folder / "state.json").write_text(json.dumps(state))
        process.returncode = 0  # it is ours until down(), also from another process
        wait_for("supervisor answers", (self.folder / "supervisor.sock").exists, timeout=30)
        self.run("mount", "--make-rshared", "/")
        for name in ("/run", "/var/log", "/var/lib/cni"):
            Path(name).mkdir(exist_ok=True)
            self.run("mount", "-t", "tmpfs", "tmpfs", name)
        self.run("mkdir", "-p", "/run/netns", "/var/log/containers")
        self.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "address", "add", f"{API_SERVICE}/32", "dev", "lo")
        _ip(
            "link",
            "add",
            "podsettle0",
            "type",
            "veth",
            "peer",
            "name",
            "outside",
            "netns",
            str(process.pid),
        )
        _ip("address", "add", f"{OUTSIDE}/30", "dev", "podsettle0")
        _ip("link", "set", "podsettle0", "up")
        self.run("ip", "address", "add", f"{INSIDE}/30", "dev", "outside")
        self.run("ip", "link", "set", "outside", "up")
        self.run("ip", "route", "add", "default", "via", OUTSIDE)
        _ip("route", "add", PODS, "via", INSIDE)

    def _certificates(self) -> None:
        pki = self.folder / "pki"
        pki.mkdir(mode=0o700)
        names = f"DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,IP:{API_SERVICE},IP:{INSIDE},IP:127.0.0.1"
        (pki / "openssl.cnf").write_text(
            "[req]\nprompt=no\ndistinguished_name=dn\n[dn]\n"
            "[ca]\nbasicConstraints=critical,CA:true\nkeyUsage=critical,keyCertSign,cRLSign\nsubjectKeyIdentifier=hash\n"
            "[leaf]\nbasicConstraints=critical,CA:false\nkeyUsage=critical,digitalSignature\n"
            "extendedKeyUsage=clientAuth,serverAuth\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
            f"[server]\nbasicConstraints=critical,CA:false\nkeyUsage=critical,digitalSignature\n"
            f"extendedKeyUsage=serverAuth\nauthorityKeyIdentifier=keyid\nsubjectKeyIdentifier=hash\nsubjectAltName={names}\n"
        )
        self._certificate("ca", "/CN=podsettle test cluster", "ca")
        self._certificate("apiserver", "/CN=kube-apiserver", "server")
        self._certificate("admin", "/O=system:masters/CN=admin", "leaf")
        self._certificate("controller-manager", "/CN=system:kube-controller-manager", "leaf")
        self._certificate("scheduler", "/CN=system:kube-scheduler", "leaf")
        for node in NODES:
            self._certificate(node, f"/O=system:nodes/CN=system:node:{node}", "leaf")
        subprocess.run(
            ["openssl", "genrsa", "-out", pki / "tokens.key", "2048"],
            check=True,
            capture_output=True,
        )
        for name in ("admin", "controller-manager", "scheduler", *NODES):
            self._kubeconfig(name)

    def _certificate(self, name: str, subject: str, section: str) -> None:
        pki = self.folder / "pki"
        signer = [] if name == "ca" else ["-CA", pki / "ca.crt", "-CAkey", pki / "ca.key"]
        subprocess.run(
            [
                *(
                    "openssl",
                    "req",
                    "-x509",
                    "-newkey",
                    "ec",
                    "-pkeyopt",
                    "ec_paramgen_curve:prime256v1",
                    "-noenc",
                ),
                *(
                    "-days",
                    "7",
                    "-config",
                    pki / "openssl.cnf",
                    "-extensions",
                    section,
                    "-subj",
                    subject,
                ),
                *("-keyout", pki / f"{name}.key", "-out", pki / f"{name}.crt", *signer),
            ],
            check=True,
            capture_output=True,
        )

    def _kubeconfig(self, name: str) -> None:
        pki = self.folder / "pki"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
            "clusters": [
                {
                    "name": "test",
                    "cluster": {
                        "server": f"https://{INSIDE}:443",
                        "certificate-authority": str(pki / "ca.crt"),
                    },
                }
            ],
            "users": [
                {
                    "name": name,
                    "user": {
                        "client-certificate": str(pki / f"{name}.crt"),
                        "client-key": str(pki / f"{name}.key"),
                    },
                }
            ],
        }
        (self.folder / f"{name}.kubeconfig").write_text(json.dumps(document, indent=1))

    def _control_plane(self) -> None:
        pki, folder = self.folder / "pki", self.folder
        self._start(
            "etcd",
            "etcd",
            f"--data-dir={folder}/etcd",
            "--unsafe-no-fsync",
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
        )
        self._start(
            "kube-apiserver",
            f"{folder}/bin/kube-apiserver",
            "--etcd-servers=http://127.0.0.1:2379",
            "--bind-address=0.0.0.0",
            "--secure-port=443",
            f"--advertise-address={INSIDE}",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            f"--client-ca-file={pki}/ca.crt",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--service-cluster-ip-range={SERVICES}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki}/tokens.key",
            f"--service-account-signing-key-file={pki}/tokens.key",
            f"--kubelet-client-certificate={pki}/admin.crt",
            f"--kubelet-client-key={pki}/admin.key",
            "--kubelet-preferred-address-types=InternalIP",
            "--allow-privileged=true",
            "--profiling=false",
        )
        self._wait_api()
        self._start(
            "kube-controller-manager",
            f"{folder}/bin/kube-controller-manager",
            f"--kubeconfig={folder}/controller-manager.kubeconfig",
            f"--service-account-private-key-file={pki}/tokens.key",
            f"--root-ca-file={pki}/ca.crt",
            "--use-service-account-credentials=true",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            "--node-monitor-period=2s",
            "--node-monitor-grace-period=15s",
            "--profiling=false",
        )
        self._start(
            "kube-scheduler",
            f"{folder}/bin/kube-scheduler",
            f"--kubeconfig={folder}/scheduler.kubeconfig",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            "--profiling=false",
        )
        wait_for(
            "default service account",
            lambda: self.kubectl("get", "serviceaccount", "default", "-o=name", check=False),
        )

    def _wait_api(self) -> None:
        def ready() -> bool:
            self._must_run("kube-apiserver")
            return self.kubectl("get", "--raw=/readyz", check=False) == "ok"

        wait_for(f"API ready (see {self.folder}/log/kube-apiserver.log)", ready)

    def _containerd(self, node: str) -> None:
        folder = self.folder / node
        (folder / "cni").mkdir(parents=True)
        network = {
            "cniVersion": "0.4.0",
            "name": "pods",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "pods0",
                    "isDefaultGateway": True,
                    "hairpinMode": True,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": f"{self.folder}/addresses",
                        "ranges": [[{"subnet": PODS, "gateway": PODS_GATEWAY}]],
                    },
                }
            ],
        }
        (folder / "cni/pods.conflist").write_text(json.dumps(network, indent=1))
        (folder / "containerd.toml").write_text(
            f"""version = 2
root = "{folder}/containerd"
state = "/run/{node}"

[grpc]
address = "{folder}/containerd.sock"

[plugins."io.containerd.internal.v1.opt"]
path = "{folder}/opt"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{images.PREFIX}/pause:test"
stream_server_address = "127.0.0.1"
# This machine may not let root lower a score, which runc would otherwise try and die of.
restrict_oom_score_adj = true

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{folder}/cni"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
"""
        )
        self._start(f"containerd-{node}", "containerd", f"--config={folder}/containerd.toml")
        self._wait_containerd(node)

    def _wait_containerd(self, node: str) -> None:
        wait_for(
            f"containerd of {node} answers (see {self.folder}/log/containerd-{node}.log)",
            lambda: "overlayfs" in self._ctr(node, "plugins", "ls", check=False),
            timeout=60,
        )

    def _kubelet(self, node: str) -> None:
        folder = self.folder / node
        position = NODES.index(node)
        for top in _cgroups():
            _make_cgroup(top / node)
        (folder / "resolv.conf").write_text("")
        (folder / "kubelet.json").write_text(
            json.dumps(
                {
                    "apiVersion": "kubelet.config.k8s.io/v1beta1",
                    "kind": "KubeletConfiguration",
                    "address": INSIDE,
                    "port": 10250 + position,
                    "healthzPort": 10350 + position,
                    "authentication": {
                        "anonymous": {"enabled": False},
                        "webhook": {"enabled": False},
                        "x509": {"clientCAFile": f"{self.folder}/pki/ca.crt"},
                    },
                    "authorization": {"mode": "AlwaysAllow"},
                    "cgroupDriver": "cgroupfs",
                    "cgroupRoot": f"/{NAME}/{node}",
                    "failCgroupV1": False,
                    "failSwapOn": False,
                    "containerRuntimeEndpoint": f"unix://{folder}/containerd.sock",
                    "podLogsDir": f"/var/log/pods-{node}",
                    "resolvConf": f"{folder}/resolv.conf",
                    "evictionHard": {
                        "memory.available": "20Mi",
                        "nodefs.available": "1%",
                        "imagefs.available": "1%",
                    },
                    "imageGCHighThresholdPercent": 100,
                    "nodeStatusUpdateFrequency": "4s",
                    "maxPods": 200,
                }
            )
        )
        self._start(
            f"kubelet-{node}",
            f"{self.folder}/bin/kubelet",
            f"--config={folder}/kubelet.json",
            f"--kubeconfig={self.folder}/{node}.kubeconfig",
            f"--hostname-override={node}",
            f"--node-ip={INSIDE}",
            f"--root-dir={folder}/kubelet",
            f"--cert-dir={folder}/kubelet-pki",
        )

    def _load(self, names: tuple[str, ...], work: Path, nodes: list[str]) -> None:
        target = work / "images.tar"
        images.archive(target, work=work, names=names)
        for node in nodes:
            self._ctr(node, "images", "import", str(target))

    def _ctr(self, node: str, *arguments: str, check: bool = True) -> str:
        address = self.folder / node / "containerd.sock"
        return self.run(
            "ctr", "--address", str(address), "--namespace", "k8s.io", *arguments, check=check
        )

    def _start_postgres(self) -> str:
        programs = _postgres_programs()
        folder = self.folder / "postgres"
        dsn = f"postgresql://postgres:postgres@{INSIDE}:5432/postgres"
        if not folder.exists():
            folder.mkdir()
            shutil.chown(folder, "postgres", "postgres")
            (folder.parent / "postgres.password").write_text("postgres")
            become = ("setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups")
            self.run(
                *(
                    *become,
                    f"{programs}/initdb",
                    "-D",
                    f"{folder}/data",
                    "-U",
                    "postgres",
                    "--no-sync",
                ),
                *(
                    "-A",
                    "scram-sha-256",
                    "-E",
                    "UTF8",
                    f"--pwfile={folder.parent}/postgres.password",
                ),
            )
            hba = folder / "data/pg_hba.conf"
            hba.write_text("host all all all scram-sha-256\n")
            self._start(
                "postgres",
                *(*become, f"{programs}/postgres", "-D", f"{folder}/data", "-c", "fsync=off"),
                *("-c", f"listen_addresses={INSIDE}", "-c", f"unix_socket_directories={folder}"),
            )
        wait_for(
            f"Postgres answers (see {self.folder}/log/postgres.log)",
            lambda: self.run(f"{programs}/pg_isready", "-h", INSIDE, check=False).endswith(
                "accepting connections\n"
            ),
            timeout=60,
        )
        return dsn

    def _start(self, name: str, *argv: str) -> None:
        command = {
            "name": name,
            "argv": argv,
            "env": {},
            "output": f"{self.folder}/log/{name}.log",
        }
        (self.folder / f"{name}.command").write_text(json.dumps(command))
        self._ask(do="start", **command)

    def _must_run(self, name: str) -> None:
        code = self._ask(do="status")["exit_codes"].get(name)
        if code is not None:
            tail = (self.folder / f"log/{name}.log").read_text(errors="replace")[-2000:]
            raise ClusterError(f"{name} ended with {code}: {tail}")

    def _ask(self, **request: Any) -> dict[str, Any]:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.folder / "supervisor.sock"))
            connection.sendall(json.dumps(request, default=str).encode() + b"\n")
            with connection.makefile() as answers:
                answer = json.loads(answers.readline())
        if "error" in answer:
            raise ClusterError(f"{request}: {answer['error']}")
        return answer


class External:
    """A cluster that somebody else runs, named by E2E_KUBECONFIG.

    Its nodes must hold the images that E2E_IMAGE_PREFIX names (as in registry.example/podsettle, for .../task:test,
    .../task-noshell:test and .../reconciler:test), and E2E_DSN must name an empty Postgres that both pods and this
    machine reach. What only the owner of a cluster can do (stop a node, restart the API) is not asked of it.
    """

    def __init__(self, kubeconfig: str) -> None:
        """Take the cluster of this kubeconfig."""
        self.kubeconfig = Path(kubeconfig)
        self.owned = False
        self.outside = os.environ.get("E2E_OUTSIDE_ADDRESS", "")

    def kubectl(self, *arguments: str, data: str | None = None, check: bool = True) -> str:
        """Run kubectl from the search path."""
        return _kubectl(Path("kubectl"), self.kubeconfig, arguments, data, check=check)

    def load(self, *names: str) -> None:
        """Do nothing: the images are there already."""

    def nodes(self) -> list[str]:
        """List the nodes."""
        return self.kubectl("get", "nodes", "-o=jsonpath={.items[*].metadata.name}").split()

    def postgres(self) -> str:
        """Return the DSN that was given."""
        return os.environ["E2E_DSN"]


@contextlib.contextmanager
def cluster(nodes: int = 2) -> Iterator[Cluster | External]:
    """Give a running cluster: the one that E2E_KUBECONFIG names, or one of our own for as long as it is used."""
    given = os.environ.get("E2E_KUBECONFIG")
    if given:
        yield External(given)
        return
    own = Cluster()
    if os.environ.get("E2E_REUSE") and own.running():
        yield own
        return
    own.up(nodes)
    try:
        yield own
    finally:
        own.down(keep_logs=bool(os.environ.get("E2E_KEEP_LOGS")))


def image(name: str) -> str:
    """Name an image as pods must."""
    return f"{os.environ.get('E2E_IMAGE_PREFIX', images.PREFIX)}/{name}:test"


def _kubectl(
    program: Path, kubeconfig: Path, arguments: tuple[str, ...], data: str | None, *, check: bool
) -> str:
    done = subprocess.run(
        [program, "--kubeconfig", kubeconfig, *arguments],
        input=data,
        stdin=subprocess.DEVNULL if data is None else None,
        capture_output=True,
        text=True,
        check=False,
    )
    if check and done.returncode != 0:
        raise ClusterError(
            f"kubectl {' '.join(arguments)} ended with {done.returncode}: {done.stderr}"
        )
    return done.stdout


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _start_time(pid: int) -> str | None:
    """Tell one process from a later one with the same number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except FileNotFoundError:
        return None


def _cgroups() -> list[Path]:
    """List where the cluster's own groups are: one place with cgroup v2, one for each controller with v1."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        return [root / NAME]
    kinds = [
        path
        for path in root.iterdir()
        if (path / "cgroup.procs").exists() and not path.is_symlink()
    ]
    return [path / NAME for path in sorted(kinds)]


def _make_cgroup(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for folder in (path.parent, path):
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (folder / name).exists() and not (folder / name).read_text().strip():
                (folder / name).write_text((folder.parent / name).read_text())
        controllers = folder.parent / "cgroup.controllers"
        if controllers.exists():
            wanted = " ".join(f"+{name}" for name in controllers.read_text().split())
            (folder.parent / "cgroup.subtree_control").write_text(wanted)


def _remove_cgroup(top: Path) -> None:
    def gone() -> bool:
        for folder, _, _ in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()
        return not top.exists()

    wait_for(f"{top} empty and removed", gone, timeout=60)


def _postgres_programs() -> Path:
    chosen = os.environ.get("E2E_POSTGRES_BIN")
    found = [Path(chosen)] if chosen else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not found:
        raise ClusterError("no Postgres server here: install postgresql, or set E2E_POSTGRES_BIN")
    return found[-1]


def main() -> None:
    """Run one command from the command line."""
    parser = argparse.ArgumentParser(prog="harness.py", description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("up").add_argument("--nodes", type=int, choices=(1, 2), default=1)
    for name in ("down", "kubeconfig", "load", "postgres"):
        commands.add_parser(name)
    commands.add_parser("kubectl").add_argument("arguments", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    own = Cluster()
    match asked.command:
        case "up":
            own.up(asked.nodes)
            print(own.kubeconfig)
        case "down":
            own.down()
        case "kubeconfig":
            print(own.kubeconfig)
        case "load":
            own.load("task", "task-noshell", "reconciler")
        case "postgres":
            print(own.postgres())
        case "kubectl":
            program = own.folder / "bin/kubectl"
            os.execv(program, [str(program), "--kubeconfig", str(own.kubeconfig), *asked.arguments])


if __name__ == "__main__":
    main()
