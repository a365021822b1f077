"""The commands, see `cluster --help`."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import build, images, leftovers, lifecycle, network, node, requirements, status
from .errors import ClusterError
from .paths import Home, Place

EPILOG = """\
Everything lives in $OUTRIDER_HOME (~/.cache/outrider). Each cluster takes a free private /16, or
$OUTRIDER_CLUSTER_NET (like 10.199). With CLUSTER=current the commands leave the machine alone and use the
cluster of the current kubectl context.
"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="cluster",
        description="A real one-node Kubernetes cluster on this machine, in namespaces of its own.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    name = os.environ.get("OUTRIDER_CLUSTER") or "default"
    top.add_argument("--name", default=name, help="which cluster (default: $OUTRIDER_CLUSTER or 'default')")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("packages", help="install the Debian packages that are missing")
    command = commands.add_parser("build", help="compile the components: minutes the first time, kept after that")
    command.add_argument(
        "--background", action="store_true", help="start it and return; `build` and `up` then wait for it"
    )
    command = commands.add_parser("up", help="start; returns when node, Services and DNS work")
    command.add_argument("--gpus", type=_count, metavar="N", help="nvidia.com/gpu that the node claims to have")
    command = commands.add_parser("down", help="stop, keeping images and logs")
    command.add_argument("--purge", action="store_true", help="forget those too")
    commands.add_parser("status", help="processes, memory, disk, node, pods; exits 0 up, 3 down, 4 half started")
    command = commands.add_parser("load-image", help="copy images from buildah into the node, changed layers only")
    command.add_argument("images", nargs="+", metavar="NAME")
    commands.add_parser("kubeconfig", help="print the path of the kubeconfig")
    commands.add_parser("kubectl", help="kubectl on this cluster", usage="%(prog)s ARGUMENTS...")
    command = commands.add_parser("kill", help="signal a component; it is started again after a second")
    command.add_argument("component", choices=(*build.PROGRAMS[:-2], "coredns", "containerd"))
    command.add_argument("signal", nargs="?", type=_signal, default=signal.SIGTERM, metavar="SIGNAL")
    commands.add_parser("sh", help="a shell, or a command, inside the node's namespaces", usage="%(prog)s [COMMAND...]")
    commands.add_parser("_node").add_argument("network")
    return top


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """What follows `kubectl` or `sh` is passed on as it is, options first or not."""
    places = (n for n, word in enumerate(argv) if word in ("kubectl", "sh") and argv[n - 1 : n] != ["--name"])
    passing = next(places, len(argv))
    arguments = parser().parse_args(argv[: passing + 1])
    if passing < len(argv):
        arguments.arguments = list(argv[passing + 1 :])
    return arguments


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GPUs")
    return int(text)


def _signal(text: str) -> signal.Signals:
    try:
        return signal.Signals[f"SIG{text.upper().removeprefix('SIG')}"]
    except KeyError:
        raise argparse.ArgumentTypeError(f"{text!r} is no signal, like TERM or KILL") from None


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(sys.argv[1:] if argv is None else argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a stopped `up` clears what it began
    try:
        if os.environ.get("CLUSTER") == "current":
            return _with_current_context(arguments)
        return _run(arguments)
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if arguments.command == "_node":
            raise  # its log is read by who looks for a fault
        print(f"cluster: {error.strerror or error}: {error.filename or 'see above'}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(arguments: argparse.Namespace) -> int:
    home = Home.of()
    place = Place.of(home, arguments.name)
    match arguments.command:
        case "packages":
            print(requirements.install_packages())
        case "build" if arguments.background:
            print(build.in_background(home, [sys.executable, str(lifecycle.ENTRY), "build"]))
        case "build":
            print(f"cluster build: {build.ensure(home)}")
        case "up":
            print(lifecycle.up(home, place, arguments.gpus))
        case "down":
            print(lifecycle.down(place, arguments.purge))
        case "status":
            code, text = status.report(home, place)
            print(text)
            return code
        case "load-image":
            lifecycle.require_ready(place)
            for name in arguments.images:
                print(images.load(home, place, name), flush=True)
        case "kubeconfig":
            lifecycle.require_ready(place)
            print(place.kubeconfig)
        case "kubectl":
            lifecycle.require_ready(place)
            program = build.binaries(home) / "kubectl"
            os.execv(program, ["kubectl", "--kubeconfig", str(place.kubeconfig), *arguments.arguments])
        case "kill":
            return _kill(place, arguments.component, arguments.signal)
        case "sh":
            return subprocess.call(_inside(place, arguments.arguments or ["bash"]))
        case "_node":
            node.run(place, network.parse(arguments.network), build.binaries(home))
    return 0


def _kill(place: Place, component: str, number: signal.Signals) -> int:
    lifecycle.require_ready(place)
    pids = [process.pid for process in status.processes(place) if process.name == component]
    if not pids:
        raise ClusterError(f"{component} does not run just now; its log is {place.logs / component}.log")
    for pid in pids:
        os.kill(pid, number)
    return 0


def _inside(place: Place, command: Sequence[str]) -> list[str]:
    lifecycle.require_ready(place)
    return ["nsenter", "-t", str(leftovers.init_pid(place)), "-n", "-m", "-p", "-u", "-i", *command]


def _with_current_context(arguments: argparse.Namespace) -> int:
    match arguments.command:
        case "kubeconfig":
            print(current_kubeconfig())
        case "kubectl":
            os.execvp("kubectl", ["kubectl", *arguments.arguments])
        case "up" | "down" | "build" | "packages":
            print(f"cluster {arguments.command}: nothing to do, CLUSTER=current uses {current_kubeconfig()}")
        case "load-image":
            raise ClusterError("CLUSTER=current: push the images to a registry that the cluster pulls from instead")
        case _:
            raise ClusterError(f"{arguments.command} is for the local cluster; unset CLUSTER=current")
    return 0


def current_kubeconfig(environment: Mapping[str, str] = os.environ) -> Path:
    """The caller's own; the first one where KUBECONFIG lists several. Raises ClusterError if it does not exist."""
    named = [part for part in environment.get("KUBECONFIG", "").split(os.pathsep) if part]
    path = Path(named[0] if named else "~/.kube/config").expanduser()
    if not path.exists():
        raise ClusterError(f"CLUSTER=current, but there is no kubeconfig at {path}; set KUBECONFIG")
    return path


if __name__ == "__main__":
    sys.exit(main())
