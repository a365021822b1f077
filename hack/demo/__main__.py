"""The demo, in the order it is told. For the tests, `python -m demo images` only builds, and `prepare` stops where
they begin."""

from __future__ import annotations

import sys
import time
from functools import partial

import openai
from localcluster.progress import elapsed

from . import chat, images, install, models
from .chat import Answer
from .cluster import Cluster, choose
from .kubectl import Kubectl, condition, is_true, stands_at
from .load import COPYING, Load
from .steps import ROOT, StepError, step
from .story import Story, speculation

SAMPLES = ROOT / "manifests/samples"
OBJECTS = {"demo": SAMPLES / "demo.yaml", "demo-ngram": SAMPLES / "demo-ngram.yaml"}
IN_FLIGHT = 8  # requests of the load: twice the disableAtConcurrency of demo-ngram
KUBECTL = "hack/cluster/cluster kubectl"
OPERATOR_LOGS = f"{KUBECTL} -n {install.NAMESPACE} logs {install.OPERATOR}"


def main(arguments: list[str]) -> int:
    began = time.monotonic()
    cluster = choose()
    if arguments == ["images"]:
        build(cluster)
        return 0
    prepare(cluster)
    if arguments == ["prepare"]:
        return 0
    kubectl = cluster.kubectl
    serve(cluster)
    with cluster.reach(kubectl, "demo") as url, cluster.reach(kubectl, "demo-ngram") as ngram_url:
        plain = ask(kubectl, url)
        draft(kubectl, url, plain)
        copy(ngram_url)
        saturate(kubectl, ngram_url)
    remove = REMOVE_LOCAL if cluster.local else REMOVE_FOREIGN
    print(AFTERWORD.format(elapsed=elapsed(time.monotonic() - began), remove=remove))
    return 0


def build(cluster: Cluster) -> None:
    with step("images", ["hack/image/buildah images", "df -h"]) as now:
        now.done(images.build(now, cluster))


def prepare(cluster: Cluster) -> None:
    """Images, cluster, operator and model: everything a SpeculativeModel needs."""
    build(cluster)
    with step("cluster", ["hack/cluster/cluster status", "the logs that the message names"]) as now:
        now.done(cluster.up(now))
    with step("load", ["hack/cluster/cluster status", "df -h"]) as now:
        now.done(images.load(now, cluster))
    with step("operator", [f"{KUBECTL} -n {install.NAMESPACE} describe pods", OPERATOR_LOGS]) as now:
        install.install(now, cluster)
        now.done("installed from manifests/install and available")
    with step("model", [f"{sys.executable} hack/demo_models.py"]) as now:
        models.convert(now, sys.executable)
        now.done("SmolLM2-135M-Instruct, and as draft its own copy rounded to 4 bits")


def serve(cluster: Cluster) -> None:
    """Apply both samples and wait until they are Ready."""
    kubectl = cluster.kubectl
    look_at = [f"{KUBECTL} describe specm demo", f"{KUBECTL} get events", f"{KUBECTL} logs deployment/demo"]
    with step("serving", look_at) as now:
        if cluster.local:
            models.offer(kubectl)
        else:
            models.require_claim(kubectl)
        for path in OBJECTS.values():
            kubectl("apply", "--filename", str(path))
        for name in OBJECTS:
            if cluster.local and images.replace_stale_pods(kubectl, f"outrider.dev/model={name}", images.RUNTIME):
                now.say(f"{name}: a new build of the runtime takes over")
            now.wait(f"{name} Ready", partial(ready, kubectl, name), 300)
        now.done("both objects are Ready")
    print(f"\n$ kubectl get specm\n{kubectl('get', 'specm')}")


def ready(kubectl: Kubectl, name: str) -> tuple[bool | None, str]:
    obj = kubectl.get("specm", name)
    return (True if is_true(obj, "Ready") else None), f"{name}: {stands_at(obj, 'Ready')}"


def ask(kubectl: Kubectl, url: str) -> Answer:
    """One question, streamed, in mode Auto: the runtime finds that this draft does not pay, and status says so."""
    service = chat.client(url)
    with step("question", [f"{KUBECTL} logs deployment/demo"]) as now:
        chat.await_endpoints(service)
        print(f"\n> {chat.QUESTION}\n")
        answer = chat.ask(service, "demo", chat.QUESTION, max_tokens=64, show=show)
        print("\n")
        now.wait("told in status", partial(traffic_seen, kubectl), 90)
        found = condition(kubectl.get("specm", "demo"), "SpeculationActive")
        print(f"""  SpeculationActive is {found["status"]}, {found["reason"]}: {found["message"]}.
  The draft is the target's own copy with its weights rounded to 4 bits, as large as the target, so on a CPU it saves
  passes through the target and no time. Mode Auto decodes plainly: it drafted {answer.drafted} tokens to look again.
""")
    return answer


def traffic_seen(kubectl: Kubectl) -> tuple[bool | None, str]:
    obj = kubectl.get("specm", "demo")
    reason = condition(obj, "SpeculationActive").get("reason")
    return (None if reason in (None, "Pending", "NoTraffic") else True), stands_at(obj, "SpeculationActive")


def draft(kubectl: Kubectl, url: str, plain: Answer) -> None:
    """The same question in mode Enabled, which drafts whether it pays or not: the same text in fewer passes."""
    service = chat.client(url)
    change_mode = partial(kubectl, "patch", "specm", "demo", "--type=merge", "--patch")
    print("$ kubectl patch specm demo --type=merge --patch " + f"'{mode('Enabled')}'")
    with step("drafting", [f"{KUBECTL} describe specm demo", f"{KUBECTL} logs deployment/demo"]) as now:
        change_mode(mode("Enabled"))
        now.wait("the pod is told", partial(drafts, service), 60)
        answer = chat.ask(service, "demo", chat.QUESTION, max_tokens=64)
        change_mode(mode("Auto"))
        if answer.text != plain.text:
            raise StepError(f"speculation changed the answer; with it:\n{answer.text}")
        if not answer.accepted:
            raise StepError(f"no drafted token was accepted, of {answer.drafted}")
        now.done("the same pod drafts, nothing was restarted")
    print(f"""
  mode Auto gave the same text: {plain.tokens} tokens, {plain.forwards} passes through the target
  mode Enabled: {answer.tokens} tokens, {answer.forwards} passes ({per_token(answer)} a token); \
{answer.accepted} of {answer.drafted} drafted tokens accepted ({answer.accepted / answer.drafted:.0%})
""")


def mode(name: str) -> str:
    return f'{{"spec": {{"speculativeDecoding": {{"mode": "{name}"}}}}}}'


def drafts(service: openai.OpenAI) -> tuple[bool | None, str]:
    """Whether a request that drafting would help is drafted for."""
    answer = chat.ask(service, "demo", chat.QUESTION, max_tokens=8)
    return (True if answer.accepted else None), f"{answer.drafted} tokens drafted"


def per_token(answer: Answer) -> str:
    return f"{answer.forwards / answer.tokens:.2f}"


def show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def copy(url: str) -> None:
    """A prompt whose answer repeats it: n-gram speculation has no draft to run, so here it does save time."""
    service = chat.client(url)
    with step("copying", [f"{KUBECTL} logs deployment/demo-ngram"]):
        chat.await_endpoints(service)
        chat.ask(service, "demo-ngram", chat.COPYING, max_tokens=4)  # the first request warms up both
        plain = chat.ask(service, "demo-ngram", chat.COPYING, max_tokens=112, speculative=False)
        ngram = chat.ask(service, "demo-ngram", chat.COPYING, max_tokens=112)
        if ngram.text != plain.text:
            raise StepError(f"speculation changed the answer:\n{ngram.text}\nwithout it:\n{plain.text}")
    print(f"""A prompt to copy from (rewrite this function), {plain.tokens} tokens, the same text both ways:
  plain  {plain.tokens_per_second:5.1f} tokens/s, {per_token(plain)} passes a token
  n-gram {ngram.tokens_per_second:5.1f} tokens/s, {per_token(ngram)} passes a token
""")
    if ngram.tokens_per_second <= plain.tokens_per_second:
        print("  n-gram was not faster this time: something else uses this machine's cores\n")


def saturate(kubectl: Kubectl, url: str) -> None:
    """More requests than speculation pays for, then fewer: status tells what the operator does about it."""
    service = chat.client(url)
    print(f"{IN_FLIGHT} requests at a time, twice what demo-ngram calls saturated, then none:\n")
    story = Story(kubectl, "demo-ngram")
    with step("saturation", [f"{KUBECTL} describe specm demo-ngram", OPERATOR_LOGS]) as now:
        story.until(now, "Active", lambda obj: speculation(obj)[0] == "Active", 60)
        with Load(service, "demo-ngram", IN_FLIGHT, questions=COPYING) as load:
            story.until(now, "Suspended", lambda obj: speculation(obj) == ("Suspended", "Saturated"), 90)
        story.until(now, "Active again", lambda obj: speculation(obj)[0] == "Active", 90)
    outcomes = [f"{count} {outcome}" for outcome, count in sorted(load.outcomes.items())]
    print(f"\n  requests of the load: {', '.join([*outcomes, 'the rest cancelled when it ended'])}")
    events = ("events", "--for", "specm/demo-ngram")
    print(f"\n$ kubectl {' '.join(events)}\n{kubectl(*events)}")


AFTERWORD = """
Done in {elapsed}. To look around:
  hack/cluster/cluster kubectl get specm -o wide
  hack/cluster/cluster kubectl describe specm demo
  hack/cluster/cluster kubectl explain specm.spec.speculativeDecoding
  hack/cluster/cluster kubectl edit specm demo          # toggles and thresholds restart nothing
To remove it:
  {remove}"""
REMOVE_LOCAL = "make down                   # images and caches stay: the next demo is quick"
REMOVE_FOREIGN = "kubectl delete specm demo demo-ngram; kubectl delete -k manifests/install"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
