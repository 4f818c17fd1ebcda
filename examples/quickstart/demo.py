"""Starts simulated model servers, Attaché and Envoy, sends a mixed load through them and shows where each request went.

Started by run.sh. Python's standard library only.
"""

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


def start_stack(stack, options):
    """Starts everything; the addresses of Envoy's listener and of the picker's pages."""
    fleet = ["sim", "--bind", "127.0.0.1", "--port", "0", "--endpoints", str(SERVERS), "--model", MODEL, "--speed", SPEED]
    stack.start("sim", [options.attache, *fleet])
    found = stack.wait_for("sim", "servers", lambda: next((line for line in stack.lines("sim", "out") if "listening" in line), None))
    servers = found["listening"]

    picker = ["run", "--bind", "127.0.0.1", "--secure-serving=false", "--log-format", "json", "--strategy", options.strategy]
    picker += ["--grpc-port", "0", "--grpc-health-port", "0", "--metrics-port", "0", "--drain-min-delay", "0s"]
    picker += [argument for server in servers for argument in ("--endpoint", server)]
    stack.start("attache", [options.attache, *picker])

    def listening():
        for line in stack.lines("attache", "err"):
            fields = {**line, **line.get("fields", {})}
            if fields.get("message") == "listening":
                return fields

    ports = stack.wait_for("attache", "listeners", listening)
    stack.wait_for("attache", "readiness", lambda: answers(ports["metrics"], "/ready"))

    clients, admin = free_port(8080), free_port(9901)
    if clients != 8080:
        print(f"port 8080 is taken, Envoy listens on {clients}")
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


def milliseconds(times):
    """The median of `times`, which are seconds."""
    times = sorted(time for time in times if time is not None)
    return f"{times[len(times) // 2] * 1000:.0f} ms" if times else "-"


def count(value):
    return "-" if value is None else f"{value:,}"


class Table:
    """Where requests went: redrawn in place on a terminal, else a line a request."""

    HEAD = f"{'request':<16}{'endpoint':<16}{'why':<16}{'TTFT':>8}{'total':>8}{'prompt':>7}{'cached':>8}"

    def __init__(self, pages):
        self.pages, self.requests, self.lock = pages, [], threading.Lock()
        self.live, self.drawn = sys.stdout.isatty(), 0
        if not self.live:
            print(self.HEAD)

    def add(self, request):
        decision = self.decision(request.id)
        with self.lock:
            if decision:
                request.why = decision.get("reason", "")
                request.server = decision.get("served") or decision.get("endpoint") or request.server
            self.requests.append(request)
            if self.live:
                self.draw()
            else:
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

    @staticmethod
    def row(request):
        if request.error:
            return f"{request.label:<16}{request.server:<16}{request.error}"
        why = request.why if len(request.why) < 16 else request.why[:14] + "…"
        return (f"{request.label:<16}{request.server:<16}{why:<16}{milliseconds([request.ttft]):>8}{milliseconds([request.total]):>8}"
                f"{count(request.prompt_tokens):>7}{count(request.cached_tokens):>8}")

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

    def summary(self):
        if not self.live:
            print("\n" + "\n".join(self.totals()))
        chats = [request for request in self.requests if request.label.startswith("chat") and not request.error]
        warm, cold = ([chat.ttft for chat in chats if bool(chat.cached_tokens) == cached] for cached in (True, False))
        print(f"\nfirst token of a chat: {milliseconds(cold)} with nothing cached ({len(cold)}), {milliseconds(warm)} with a part ({len(warm)})")


def load(address, pages):
    table = Table(pages)
    with concurrent.futures.ThreadPoolExecutor(CONVERSATIONS + 3) as pool:
        work = [pool.submit(conversation, number, address, table.add) for number in range(CONVERSATIONS)]
        work += [pool.submit(singles, number, address, table.add) for number in range(3)]
        for future in work:
            future.result()
    table.summary()
    failed = [request for request in table.requests if request.error]
    unexplained = [request for request in table.requests if not request.error and not request.why]
    for request in failed:
        print(f"failed: {request.label}: {request.error}", file=sys.stderr)
    for request in unexplained:
        print(f"no decision on record for {request.label} ({request.id})", file=sys.stderr)
    if failed or unexplained:
        raise Failure(f"{len(failed)} of {len(table.requests)} requests failed, {len(unexplained)} have no decision on record")
    print(f"all {len(table.requests)} requests were answered")


def hints(address, pages, stay):
    messages = [{"role": "user", "content": "hello"}]
    body = lambda **more: json.dumps({"model": MODEL, "messages": messages, "max_tokens": 16, **more}, separators=(",", ":"))
    print("\ntry:" if stay else "\nwith --stay everything stays up, and you can try:")
    for flags, path, data in [("-si", "/v1/chat/completions", body()), ("-sN", "/v1/messages", body(stream=True))]:
        print(f"  curl {flags} http://{address}{path} \\\n    -H 'content-type: application/json' \\\n    -d '{data}'")
    if stay:
        print(f"endpoints, decisions and metrics: http://{pages}/     ctrl-C ends it")


def main():
    parser = argparse.ArgumentParser(prog="examples/quickstart/run.sh", description=__doc__)
    parser.add_argument("--stay", action="store_true", help="leave everything running until ctrl-C")
    parser.add_argument("--strategy", default="predicted-latency", help="how the picker chooses (default: %(default)s)")
    for name in ("attache", "envoy", "bootstrap"):
        parser.add_argument(f"--{name}", required=True, help=argparse.SUPPRESS)
    options = parser.parse_args()

    def ended(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, ended)
    logs = tempfile.mkdtemp(prefix="attache-quickstart-")
    stack = Stack(logs)
    code = 0
    try:
        print(f"starting {SERVERS} simulated model servers, attache and Envoy; logs in\n{logs}")
        address, pages = start_stack(stack, options)
        load(address, pages)
        hints(address, pages, options.stay)
        while options.stay:
            time.sleep(0.5)
            if stack.dead():
                raise Failure(f"ended by itself: {', '.join(stack.dead())}; logs in {logs}")
    except KeyboardInterrupt:
        code = 0 if options.stay else 130
    except Failure as failure:
        print(f"quickstart: {failure}", file=sys.stderr)
        code = 1
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stack.stop()
    if code == 0:
        shutil.rmtree(logs, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
