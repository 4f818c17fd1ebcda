"""Simulated model servers, Attaché and Envoy on this machine: one load is played with round robin and with the default strategy.

The output shows for each request the endpoint, the reason and the runner-up, and at the end both results side by side.
"""

# Started by run.sh. Python's standard library only.

import argparse
import concurrent.futures
import http.client
import json
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid

SERVERS = 4
MODEL = "sim-8b"
# A quarter of the speed of the modelled GPU: slow enough to watch, and to see what a cached prompt saves.
SPEED = "0.25"
ROWS_SHOWN = 14
BASELINE = "round-robin"
# Ports with --stay, so that the printed commands are always the same.
FIXED = {"envoy": 8080, "envoy admin": 9901, "sim": 8001, "grpc": 9002, "health": 9003, "metrics": 9090}


class Stack:
    """The processes, ended by their ids in reverse order of their start."""

    def __init__(self, logs):
        self.logs = pathlib.Path(logs)
        self.children = []

    def start(self, name, command):
        out, err = (open(self.logs / f"{name}.{kind}", "w+") for kind in ("out", "err"))
        # Its own session: ctrl-C is for this script, which then ends its children in order.
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
        self.children.append((name, child))
        return child

    def wait_for(self, name, what, look, seconds=30):
        child = dict(self.children)[name]
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = look()
            if found:
                return found
            if child.poll() is not None:
                raise Failure(f"{name} ended with {child.returncode} before {what}\n{self.tail(name)}")
            time.sleep(0.02)
        raise Failure(f"{name}: no {what} after {seconds} s\n{self.tail(name)}")

    def lines(self, name, kind):
        for line in (self.logs / f"{name}.{kind}").read_text(errors="replace").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def tail(self, name):
        return "\n".join((self.logs / f"{name}.err").read_text(errors="replace").splitlines()[-15:])

    def dead(self):
        return [name for name, child in self.children if child.poll() is not None]

    def stop(self):
        for _, child in reversed(self.children):
            if child.poll() is None:
                child.terminate()
        for _, child in reversed(self.children):
            try:
                child.wait(timeout=5)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


class Failure(Exception):
    """Something that ends the demonstration with a message instead of a traceback."""


def free_port(wanted):
    """`wanted` if nobody has it, else one of the system's choice."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise Failure("no free port on 127.0.0.1")


def render(bootstrap, ports):
    """The shipped bootstrap with other ports."""
    text = pathlib.Path(bootstrap).read_text().replace("address: 0.0.0.0", "address: 127.0.0.1")
    for old in ports:
        if f"port_value: {old}}}" not in text:
            raise Failure(f"{bootstrap} has no port {old}")
        text = text.replace(f"port_value: {old}}}", f"port_value: @{old}@}}")
    for old, new in ports.items():
        text = text.replace(f"@{old}@", str(new))
    return text


def get(address, path):
    connection = http.client.HTTPConnection(address, timeout=5)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def get_json(address, path):
    status, body = get(address, path)
    return json.loads(body) if status == 200 else None


def answers(address, path):
    try:
        return get(address, path)[0] == 200
    except OSError:
        return False


def start_stack(stack, options, strategy, fixed):
    """Starts everything; the addresses of Envoy's listener and of the picker's pages."""
    if fixed:
        taken = [f"{port} ({name})" for name, port in FIXED.items() if free_port(port) != port]
        if taken:
            raise Failure(f"--stay needs these ports, which other programs use: {', '.join(taken)}")
    wanted = lambda name: FIXED[name] if fixed else 0
    fleet = ["sim", "--bind", "127.0.0.1", "--port", str(wanted("sim")), "--endpoints", str(SERVERS), "--model", MODEL, "--speed", SPEED]
    stack.start("sim", [options.attache, *fleet])
    found = stack.wait_for("sim", "servers", lambda: next((line for line in stack.lines("sim", "out") if "listening" in line), None))
    servers = found["listening"]

    # Every decision is logged with the score of each endpoint.
    config = {"apiVersion": "attache.dev/v1", "kind": "Attache", "exchange": {"explain": {"logRatio": 1}},
              "pools": [{"name": "default", "strategy": strategy, "endpoints": servers}]}
    picker = ["run", "--bind", "127.0.0.1", "--secure-serving=false", "--log-format", "json", "--config-text", json.dumps(config)]
    picker += ["--grpc-port", str(wanted("grpc")), "--grpc-health-port", str(wanted("health")), "--metrics-port", str(wanted("metrics"))]
    picker += ["--drain-min-delay", "0s"]
    stack.start("attache", [options.attache, *picker])

    def listening():
        for line in stack.lines("attache", "err"):
            fields = {**line, **line.get("fields", {})}
            if fields.get("message") == "listening":
                return fields

    ports = stack.wait_for("attache", "listeners", listening)
    stack.wait_for("attache", "readiness", lambda: answers(ports["metrics"], "/ready"))

    clients, admin = (FIXED["envoy"], FIXED["envoy admin"]) if fixed else (free_port(0), free_port(0))
    port = lambda name: int(ports[name].rsplit(":", 1)[1])
    bootstrap = stack.logs / "envoy.yaml"
    bootstrap.write_text(render(options.bootstrap, {8080: clients, 9901: admin, 9002: port("grpc"), 9003: port("health")}))
    stack.start("envoy", [options.envoy, "-c", str(bootstrap), "--disable-hot-restart", "--concurrency", "2", "--log-level", "warning"])
    stack.wait_for("envoy", "readiness", lambda: answers(f"127.0.0.1:{admin}", "/ready") and answers(f"127.0.0.1:{clients}", "/v1/models"))
    return f"127.0.0.1:{clients}", ports["metrics"]


class Request:
    """One request and what came of it."""

    def __init__(self, label, path, body):
        self.id, self.label, self.path, self.body = str(uuid.uuid4()), label, path, body
        self.status = self.first = self.total = None
        self.server = self.error = self.text = ""
        self.prompt_tokens = self.cached_tokens = None
        self.why = ""
        self.scores = []

    def send(self, address):
        started = time.monotonic()
        try:
            connection = http.client.HTTPConnection(address, timeout=60)
            headers = {"content-type": "application/json", "x-request-id": self.id}
            connection.request("POST", self.path, json.dumps(self.body), headers)
            response = connection.getresponse()
            self.status = response.status
            self.server = response.headers.get("x-sim-server", "?")
            first = response.read1(65536)
            self.first = time.monotonic() - started
            raw = first + response.read()
            self.read(raw.decode())
            connection.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.error = f"{type(error).__name__}: {error}"
        self.total = time.monotonic() - started
        return self

    @property
    def ttft(self):
        """Time to the first token: only a stream shows it."""
        return self.first if self.body.get("stream") else None

    def read(self, raw):
        if self.status != 200:
            self.error = f"status {self.status}: {raw[:200]}"
            return
        events = [raw]
        if self.body.get("stream"):
            events = [line[5:].strip() for line in raw.splitlines() if line.startswith("data:")]
            ended = events and (events[-1] == "[DONE]" or '"message_stop"' in events[-1])
            if not ended:
                self.error = "the stream has no end"
        for event in events:
            if event != "[DONE]":
                self.take(json.loads(event))

    def take(self, event):
        if not isinstance(event, dict):
            return
        for choice in event.get("choices") or []:
            part = choice.get("delta") or choice.get("message") or {}
            self.text += part.get("content") or choice.get("text") or ""
        usage = event.get("usage") or (event.get("message") or {}).get("usage")
        if usage:
            details = usage.get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens", usage.get("cache_read_input_tokens"))
            prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
            if "prompt_tokens" not in usage and prompt is not None:
                # Anthropic counts apart what was found in the cache and what was put there.
                prompt += (cached or 0) + (usage.get("cache_creation_input_tokens") or 0)
            self.prompt_tokens = prompt if prompt else self.prompt_tokens
            self.cached_tokens = cached if cached is not None else self.cached_tokens


DESKS = ["visas", "protocol", "archive"]
RULES = ["Answer briefly and politely, in the order in which you were asked.",
         "Name the paragraph that your answer rests on.",
         "What concerns another desk is passed on to that desk, with a note.",
         "Nobody is promised a date that the calendar does not hold.",
         "A letter that came in two languages is answered in both."]
QUESTIONS = ["Who may enter without an appointment?", "And on a Sunday?", "What must they bring?", "Who decides in the end?"]
CONVERSATIONS = 12


def instructions(desk):
    """Some 1,500 tokens, which all conversations of a desk begin with."""
    rules = (f"Rule {number}: {RULES[number % len(RULES)]}" for number in range(1, 91))
    return f"You are the attaché at the desk for {desk}. " + " ".join(rules)


def conversation(number, address, done):
    """Turns that each hold all turns before them: what a prefix cache is for."""
    pause = random.Random(number)
    messages = [{"role": "system", "content": instructions(DESKS[number % len(DESKS)])}]
    time.sleep(0.25 * number)
    for turn, question in enumerate(QUESTIONS, 1):
        messages.append({"role": "user", "content": f"Case {number}. {question}"})
        body = {"model": MODEL, "messages": list(messages), "max_tokens": 16, "stream": True}
        body["stream_options"] = {"include_usage": True}
        request = Request(f"chat {number}.{turn}", "/v1/chat/completions", body)
        done(request.send(address))
        messages.append({"role": "assistant", "content": request.text})
        time.sleep(pause.uniform(0.2, 0.8))


def singles(number, address, done):
    """Requests without a past, in the other APIs."""
    prompt = f"Note {number}: " + "the visitor waits in the hall. " * (5 + 20 * (number % 3))
    messages = [{"role": "user", "content": prompt}]
    time.sleep(2 * number)
    for label, path, body in [
        ("completion", "/v1/completions", {"prompt": prompt, "max_tokens": 16}),
        ("messages", "/v1/messages", {"messages": messages, "max_tokens": 16}),
        ("messages stream", "/v1/messages", {"messages": messages, "max_tokens": 16, "stream": True}),
        ("embedding", "/v1/embeddings", {"input": prompt}),
    ]:
        done(Request(label, path, {"model": MODEL, **body}).send(address))


def milliseconds(times, share=0.5):
    """The quantile of `times`, which are seconds; the median without a share."""
    times = sorted(time for time in times if time is not None)
    return f"{times[min(len(times) - 1, int(len(times) * share))] * 1000:.0f} ms" if times else "-"


def count(value):
    return "-" if value is None else f"{value:,}"


class Table:
    """Where requests went: redrawn in place on a terminal, else a line a request."""

    HEAD = f"{'request':<16}{'endpoint':<16}{'TTFT':>8}{'total':>8}{'prompt':>7}{'cached':>8}  why"

    def __init__(self, pages, stack, shown=True):
        self.pages, self.stack, self.requests, self.lock = pages, stack, [], threading.Lock()
        self.shown, self.live, self.drawn = shown, shown and sys.stdout.isatty(), 0
        if shown and not self.live:
            print(self.HEAD)

    def add(self, request):
        decision = self.decision(request.id)
        with self.lock:
            if decision:
                request.why = decision.get("reason", "")
                request.server = decision.get("served") or decision.get("endpoint") or request.server
                request.scores = self.scores(decision)
            self.requests.append(request)
            if self.live:
                self.draw()
            elif self.shown:
                print(self.row(request), flush=True)

    def decision(self, request_id):
        # A record is written when Envoy has ended the stream, a moment after the client has the last byte.
        for _ in range(50):
            page = get_json(self.pages, "/decisions") or []
            records = page.get("decisions", []) if isinstance(page, dict) else page
            for record in records:
                if record.get("request_id") == request_id:
                    return record
            time.sleep(0.02)
        return None

    def scores(self, decision):
        """Endpoint and score of the winner and of the runner-up, from the log line of the decision."""
        lines = [line for line in self.stack.lines("attache", "err") if line.get("message") == "decision"]
        at = decision.get("sequence", 0)
        # Lines are written at almost the same moment in another order than decisions are numbered.
        matches = [(abs(number - at), line) for number, line in enumerate(lines)
                   if line.get("picks", "").split(",")[0] == decision.get("endpoint")
                   and line.get("prompt_tokens") == decision.get("estimated_prompt_tokens")]
        if not matches:
            return []
        line = min(matches, key=lambda match: match[0])[1]
        part = next((part for part in json.loads(line.get("parts", "[]")) if part["part"] == "score"), None)
        picks = line.get("picks", "").split(",")
        if not part:
            return []
        return [(pick, part["endpoints"].get(pick)) for pick in picks[:2]]

    @staticmethod
    def reason(request):
        """The whole reason, with the runner-up."""
        if len(request.scores) < 2 or None in (score for _, score in request.scores):
            return request.why
        (_, best), (second, next_best) = request.scores
        return f"{request.why}: {best:.3g}, runner-up {second} {next_best:.3g}"

    def row(self, request):
        if request.error:
            return f"{request.label:<16}{request.server:<16}{request.error}"
        return (f"{request.label:<16}{request.server:<16}{milliseconds([request.ttft]):>8}{milliseconds([request.total]):>8}"
                f"{count(request.prompt_tokens):>7}{count(request.cached_tokens):>8}  {self.reason(request)}")

    def totals(self):
        lines = [f"{'endpoint':<32}{'requests':>10}{'failed':>7}{'TTFT p50':>15}{'prompt':>7}{'cached':>8}"]
        sums = lambda of, name: sum(getattr(request, name) or 0 for request in of)
        for server in sorted({request.server for request in self.requests}) + ["total"]:
            mine = [request for request in self.requests if server in (request.server, "total")]
            failed = sum(bool(request.error) for request in mine)
            lines.append(f"{server:<32}{len(mine):>10}{failed:>7}{milliseconds(request.ttft for request in mine):>15}"
                         f"{count(sums(mine, 'prompt_tokens')):>7}{count(sums(mine, 'cached_tokens')):>8}")
        return lines

    def draw(self):
        totals, (width, height) = self.totals(), shutil.get_terminal_size()
        # What has scrolled off the screen can't be drawn again.
        shown = max(1, min(ROWS_SHOWN, height - len(totals) - 3))
        lines = [self.HEAD, *map(self.row, self.requests[-shown:]), "", *totals]
        up = f"\x1b[{self.drawn}A" if self.drawn else ""
        sys.stdout.write(up + "".join(f"\x1b[2K{line[:width - 1]}\n" for line in lines))
        sys.stdout.flush()
        self.drawn = len(lines)

    def result(self):
        """What the comparison shows, by name."""
        good = [request for request in self.requests if not request.error]
        chats = [request.ttft for request in good if request.label.startswith("chat")]
        prompt, cached = (sum(getattr(request, name) or 0 for request in good) for name in ("prompt_tokens", "cached_tokens"))
        return {
            "TTFT of chats, median": milliseconds(chats),
            "TTFT of chats, p90": milliseconds(chats, 0.9),
            "TTFT of chats, mean": f"{sum(chats) / max(1, len(chats)) * 1000:.0f} ms",
            "end-to-end latency, median": milliseconds(request.total for request in good),
            "end-to-end latency, p90": milliseconds((request.total for request in good), 0.9),
            "prompt tokens": count(prompt),
            "cached tokens": f"{count(cached)} ({100 * cached / max(1, prompt):.0f} %)",
            "computed prompt tokens": count(prompt - cached),
            "failed requests": count(len(self.requests) - len(good)),
        }


def load(address, table):
    """Plays the load; the same one each time."""
    with concurrent.futures.ThreadPoolExecutor(CONVERSATIONS + 3) as pool:
        work = [pool.submit(conversation, number, address, table.add) for number in range(CONVERSATIONS)]
        work += [pool.submit(singles, number, address, table.add) for number in range(3)]
        for future in work:
            future.result()
    if table.shown and not table.live:
        print("\n" + "\n".join(table.totals()))
    failed = [request for request in table.requests if request.error]
    unexplained = [request for request in table.requests if not request.error and not request.why]
    for request in failed:
        print(f"failed: {request.label}: {request.error}", file=sys.stderr)
    for request in unexplained:
        print(f"no decision on record for {request.label} ({request.id})", file=sys.stderr)
    if failed or unexplained:
        raise Failure(f"{len(failed)} of {len(table.requests)} requests failed, {len(unexplained)} have no decision on record")
    return table.result()


def compare(results):
    """The results side by side."""
    names = list(results)
    print("\nthe same load with each strategy:\n" + f"{'':<28}" + "".join(f"{name:>22}" for name in names))
    for figure in results[names[0]]:
        print(f"{figure:<28}" + "".join(f"{results[name][figure]:>22}" for name in names))


def hints(stay):
    address, pages = f"127.0.0.1:{FIXED['envoy']}", f"127.0.0.1:{FIXED['metrics']}"
    messages = [{"role": "user", "content": "hello"}]
    body = lambda **more: json.dumps({"model": MODEL, "messages": messages, "max_tokens": 16, **more}, separators=(",", ":"))
    print("\ntry:" if stay else "\nwith --stay everything keeps running, and you can try:")
    for flags, path, data in [("-si", "/v1/chat/completions", body()), ("-sN", "/v1/messages", body(stream=True))]:
        print(f"  curl {flags} http://{address}{path} \\\n    -H 'content-type: application/json' \\\n    -d '{data}'")
    print(f"  curl -s http://{pages}/decisions")
    print(f"  curl -s http://{pages}/endpoints")
    if stay:
        print(f"status page: http://{pages}/     Ctrl-C stops everything")


def main():
    parser = argparse.ArgumentParser(prog="examples/quickstart/run.sh", description=__doc__)
    parser.add_argument("--stay", action="store_true", help="keep everything running on fixed ports until Ctrl-C")
    parser.add_argument("--strategy", default="predicted-latency",
                        help=f"strategy to compare with {BASELINE} (default: %(default)s)")
    for name in ("attache", "envoy", "bootstrap"):
        parser.add_argument(f"--{name}", required=True, help=argparse.SUPPRESS)
    options = parser.parse_args()

    def ended(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, ended)
    logs = tempfile.mkdtemp(prefix="attache-quickstart-")
    stacks, results = [], {}
    code = 0
    try:
        print(f"{SERVERS} simulated model servers, attache and Envoy; logs in\n{logs}")
        for strategy in dict.fromkeys([BASELINE, options.strategy]):
            last = strategy == options.strategy
            directory = pathlib.Path(logs) / strategy.replace(":", "-").replace(",", "-")
            directory.mkdir()
            stack = Stack(directory)
            stacks.append(stack)
            address, pages = start_stack(stack, options, strategy, fixed=last and options.stay)
            print(f"\nplaying the load with {strategy}")
            results[strategy] = load(address, Table(pages, stack, shown=last))
            if not (last and options.stay):
                stack.stop()
        if len(results) > 1:
            compare(results)
        print("every request got a response")
        hints(options.stay)
        while options.stay:
            time.sleep(0.5)
            if stacks[-1].dead():
                raise Failure(f"ended by itself: {', '.join(stacks[-1].dead())}; logs in {logs}")
    except KeyboardInterrupt:
        code = 0 if options.stay else 130
    except Failure as failure:
        print(f"quickstart: {failure}", file=sys.stderr)
        code = 1
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for stack in stacks:
            stack.stop()
    if code == 0:
        shutil.rmtree(logs, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
