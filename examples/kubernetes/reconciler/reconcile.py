#!/usr/bin/env python3
"""Adds replicas to the Deployment of a model while load keeps its requests from their cached prefixes.

Each tick reads the pressure of the model from a picker, and adds at most one replica. The pressure is consumed when the
replica is ready. If the replica is not ready in time, the reconciler removes it. It waits before it adds one again, and
each further failure doubles the wait. It needs Python's standard library only.
"""

import argparse
import json
import logging
import os
import pathlib
import signal
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

ACCOUNT = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount")
# Longest time for one response, seconds.
TIMEOUT = 10
# Longest wait after a replica that was not ready in time, as a multiple of the first wait.
MOST_BACK_OFF = 16

log = logging.getLogger("reconcile")


class Conflict(Exception):
    """Another client has changed the object since it was read."""


class Client:
    """JSON over HTTP, with the token of the service account if there is one."""

    def __init__(self, url, token_file, ca_file=None):
        self.url = url.rstrip("/")
        self.token_file = token_file
        self.tls = ssl.create_default_context(cafile=ca_file) if self.url.startswith("https:") else None

    def call(self, method, path, body=None):
        request = urllib.request.Request(self.url + path, method=method)
        if self.token_file.exists():
            # Kubernetes replaces the token about once an hour.
            request.add_header("authorization", "Bearer " + self.token_file.read_text().strip())
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("content-type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT, context=self.tls) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            if error.code == 409:
                raise Conflict from error
            text = error.read(300).decode(errors="replace").strip()
            raise OSError(f"{method} {self.url}{path}: status {error.code}: {text}") from error


class Deployment:
    """The Deployment of a model's servers."""

    def __init__(self, client, namespace, name):
        self.client = client
        self.path = f"/apis/apps/v1/namespaces/{namespace}/deployments/{name}"

    def read(self):
        """Its scale, and how many of its replicas are ready."""
        scale = self.client.call("GET", self.path + "/scale")
        deployment = self.client.call("GET", self.path)
        return scale, deployment.get("status", {}).get("readyReplicas", 0)

    def scale(self, scale, replicas):
        """Sets the number of replicas, unless another client has changed the Deployment since `scale` was read."""
        changed = dict(scale, spec=dict(scale.get("spec", {}), replicas=replicas))
        self.client.call("PUT", self.path + "/scale", changed)


class Picker:
    """The pressure of one model, as the pickers count it."""

    def __init__(self, client, model):
        self.client = client
        self.path = "/api/pressure/" + urllib.parse.quote(model)

    def pressure(self):
        return self.client.call("GET", self.path)["count"]

    def consume(self, count):
        """Consumes what was read, and not what was counted since then."""
        return self.client.call("DELETE", f"{self.path}?count={count}")["consumed"]


class Step:
    """A replica that was added and is not ready yet."""

    def __init__(self, replicas, deadline):
        self.replicas = replicas
        self.deadline = deadline


class Reconciler:
    def __init__(self, deployment, picker, options):
        self.deployment = deployment
        self.picker = picker
        self.options = options
        self.step = None
        self.back_off = options.back_off
        self.not_before = 0.0

    def tick(self, now):
        scale, ready = self.deployment.read()
        replicas = scale.get("spec", {}).get("replicas", 0)
        if self.step and self.step.replicas != replicas:
            log.info("%d replicas were set by another client", replicas)
            self.step = None
        if self.step:
            self.follow(scale, ready, now)
        elif ready >= replicas:
            # Replicas that are starting relieve the others soon.
            self.consider(scale, replicas, now)

    def follow(self, scale, ready, now):
        """Ends the step if its replica is ready, or too late."""
        step = self.step
        if ready >= step.replicas:
            # What was counted while the replica started is relieved by it, too.
            count = self.picker.pressure()
            consumed = self.picker.consume(count) if count else 0
            log.info("replica %d is ready; consumed a pressure of %d", step.replicas, consumed)
            self.step, self.back_off = None, self.options.back_off
        elif now >= step.deadline:
            self.deployment.scale(scale, step.replicas - 1)
            log.warning("replica %d was not ready in time and is taken back; the next attempt is in %.0f s",
                        step.replicas, self.back_off)
            self.step, self.not_before = None, now + self.back_off
            self.back_off = min(2 * self.back_off, MOST_BACK_OFF * self.options.back_off)

    def consider(self, scale, replicas, now):
        """Adds one replica if there is pressure."""
        count = self.picker.pressure()
        if count < self.options.threshold:
            return
        if replicas >= self.options.max_replicas:
            log.info("pressure is %d, with %d replicas of at most %d", count, replicas, self.options.max_replicas)
        elif now < self.not_before:
            log.info("pressure is %d; the next attempt is in %.0f s", count, self.not_before - now)
        else:
            self.deployment.scale(scale, replicas + 1)
            log.info("pressure is %d: %d replicas, one more", count, replicas + 1)
            self.step = Step(replicas + 1, now + self.options.ready_within)


def positive(text):
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"`{text}` is not above 0")
    return value


def whole(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number from 1")
    return value


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picker", required=True, metavar="URL", help="admin port of a picker, e.g. http://10.0.0.7:9090")
    parser.add_argument("--model", required=True, help="name of the model on the servers")
    parser.add_argument("--deployment", required=True, metavar="NAME", help="Deployment of the model's servers")
    parser.add_argument("--namespace", help="its namespace (default: that of the pod, else `default`)")
    parser.add_argument("--max-replicas", required=True, type=whole, metavar="N", help="most replicas")
    parser.add_argument("--threshold", type=whole, default=1, metavar="N",
                        help="least diverted requests of the last minute that add a replica (default: 1)")
    parser.add_argument("--tick", type=positive, default=30.0, metavar="SECONDS",
                        help="time between two ticks (default: 30)")
    parser.add_argument("--ready-within", type=positive, default=600.0, metavar="SECONDS",
                        help="time in which a replica must be ready, else it is taken back (default: 600)")
    parser.add_argument("--back-off", type=positive, default=300.0, metavar="SECONDS",
                        help=f"wait after a replica that was not ready; it doubles up to {MOST_BACK_OFF} times "
                             "(default: 300)")
    parser.add_argument("--api", metavar="URL", help="API server (default: that of the pod's cluster)")
    parser.add_argument("--token-file", type=pathlib.Path, default=ACCOUNT / "token", metavar="FILE",
                        help="bearer token for API server and picker (default: that of the service account)")
    parser.add_argument("--ca-file", type=pathlib.Path, metavar="FILE",
                        help="authority of the API server (default: that of the service account)")
    return parser.parse_args()


def main():
    options = arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    api = options.api or f"https://{os.environ.get('KUBERNETES_SERVICE_HOST', 'kubernetes.default.svc')}:443"
    authority = options.ca_file or (ACCOUNT / "ca.crt" if (ACCOUNT / "ca.crt").exists() else None)
    own = ACCOUNT / "namespace"
    namespace = options.namespace or (own.read_text().strip() if own.exists() else "default")
    deployment = Deployment(Client(api, options.token_file, authority), namespace, options.deployment)
    reconciler = Reconciler(deployment, Picker(Client(options.picker, options.token_file), options.model), options)
    stop = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stop.set())
    while not stop.is_set():
        try:
            reconciler.tick(time.monotonic())
        except Conflict:
            log.info("the Deployment was changed by another client; trying again at the next tick")
        except (OSError, ValueError, KeyError) as error:
            log.warning("tick failed: %s", error)
        stop.wait(options.tick)


if __name__ == "__main__":
    main()
