"""Writes table.jsonl: templates, and the texts that Jinja2 renders from them with the settings of transformers.

README.md says how to run it, and what a row is.
"""

import datetime
import json
import re
import signal
import warnings
from pathlib import Path

from jinja2 import compiler, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = Path(__file__).parent


class Generation(Extension):
    """The tag that marks the tokens of responses; it has no effect on the text."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller):
        return caller()


def raise_exception(message):
    raise TemplateError(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def strftime_now(format):
    return datetime.datetime(2025, 1, 2, 3, 4, 5).strftime(format)


def environment():
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    return env


class Unfolded(compiler.CodeGenerator):
    """Computes constants when the template runs, as it computes variables."""

    def _output_child_to_const(self, node, frame, finalize):
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible()
        return super()._output_child_to_const(node, frame, finalize)


FOLDED = environment()
UNFOLDED = environment()
UNFOLDED.optimized = False
UNFOLDED.code_generator_class = Unfolded

# Expressions of every type of value.
VALUES = [
    "none", "nothing", "true", "false", "0", "1", "-7", "3", "10", "9223372036854775807", "10**25", "0.0", "-0.0", "2.5",
    "1e-7", "1e22", "-1.5", "'nan'|float", "'inf'|float", "''", "'a'", "'Hello, World-wide aB'", "' \\tx \\n'", "'12'", "'-3.7'",
    "'a,b,,c'", "'é\\u200bß\\x07\\n\\'\"\\\\'", "'<b>&'", "'ǆ ﬁ'", "'<i>\"'|safe", "''|safe", "[]", "[3, 1, 2]",
    "['b', 'A', 'c']", "[1, 'a', none]", "[[1, 2], [0]]", "()", "(1, 2)", "('x',)", "{}", "{'b': 1, 'a': [none, 1.0]}",
    "{1: 2, none: 'x'}", "[{'k': 2, 'n': 'x'}, {'k': 1}]", "{'a': 1}.items()", "{'a': 1}.keys()", "{'a': 1}.values()",
    "range(3)", "range(5, 0, -2)", "namespace(a=1)", "[1, 2]|map('string')", "dict",
]
FEW = [
    "none", "nothing", "true", "2", "-3", "0", "2.5", "1e-7", "'ab'", "'b'", "'%s'", "'<'|safe", "[1, 2]", "['ab']",
    "(1, 'b')", "{'ab': 1}", "{'ab': 1}.items()", "range(3)", "10**25",
]
FILTERS = [
    "abs", "attr('x')", "attr('upper')|string|length > 3", "batch(2)|list", "batch(2, 0)|list", "capitalize", "center(9)",
    "count", "default('D')", "default('D', true)", "d(1)", "dictsort", "dictsort(true)", "dictsort(by='value')",
    "dictsort(reverse=true)", "escape", "e", "filesizeformat", "filesizeformat(true)", "first", "float", "float(7)",
    "forceescape", "format('x')", "groupby('k')", "groupby('k')|map(attribute='list')|list", "indent", "indent(2, true)",
    "indent('> ', blank=true)", "int", "int(5)", "int(base=16)", "int(0, 0)", "items|list", "join", "join('-')",
    "join(', ', attribute='k')", "last", "length", "list", "lower", "map('upper')|list", "map(attribute='k')|list",
    "map(attribute='k', default=0)|list", "map('default', 'z')|list", "max", "min", "max(attribute='k')", "pprint",
    "reject|list", "reject('none')|list", "rejectattr('n')|list", "replace('a', 'X')", "replace('', '-', 2)",
    "replace('l', 'L', 1)", "reverse", "reverse|list", "round", "round(1)", "round(-1)", "round(1, 'floor')",
    "round(0, 'ceil')", "safe", "select|list", "select('odd')|list", "select('string')|list",
    "selectattr('k', 'gt', 1)|list", "selectattr('n')|list", "selectattr('n', 'defined')|list", "slice(2)|list",
    "slice(2, 'f')|list", "sort", "sort(true)", "sort(case_sensitive=true)", "sort(attribute='k')", "string", "striptags",
    "sum", "sum(attribute='k')", "sum(start=5)", "title", "tojson", "tojson(indent=2)", "tojson(ensure_ascii=true)",
    "tojson(sort_keys=true)", "tojson(separators=(',', ':'))", "tojson(true, none)", "trim", "trim('a ')", "truncate(8)",
    "truncate(8, true, '!')", "unique|list", "upper", "urlencode", "wordcount", "xmlattr", "safe ~ 'x'", "safe + '\"'",
    "string + 'x'", "upper ~ 1e22", "list|length", "list|first", "wordwrap(10)", "nosuch",
]
TESTS = [
    "boolean", "callable", "defined", "divisibleby 2", "divisibleby 0", "eq 1", "escaped", "even", "false", "filter",
    "float", "ge 1", "gt 1", "in [1, 'a', none]", "in 'abc'", "integer", "iterable", "le 1", "lower", "lt 1", "mapping",
    "ne 1", "none", "number", "odd", "sameas none", "sameas true", "sequence", "string", "test", "true", "undefined",
    "upper", "not none", "not defined", "equalto 'a'", "nosuch",
]
STRING_METHODS = [
    "capitalize()", "casefold()", "center(7, '*')", "center(8)", "count('l')", "count('')", "endswith('e')",
    "endswith(('b', ''))", "expandtabs(4)", "find('a')", "find('l', 3, -2)", "format(1)", "index('a')", "isalnum()",
    "isalpha()", "isascii()", "isdecimal()", "isdigit()", "isidentifier()", "islower()", "isnumeric()", "isprintable()",
    "isspace()", "istitle()", "isupper()", "join(['x', 'y'])", "join('abc')", "join([1])", "ljust(5, '.')", "lower()",
    "lstrip()", "lstrip('aH')", "partition(',')", "partition('')", "removeprefix('a')", "removesuffix('c')",
    "replace('a', 'bb')", "replace('', '-')", "replace('l', 'r', 1)", "rfind('l')", "rindex('l')", "rjust(5, '0')",
    "rpartition('l')", "rsplit(',', 1)", "rsplit()", "rsplit(none, 1)", "rsplit('l', maxsplit=1)", "rstrip()",
    "rstrip('c')", "split()", "split(',')", "split(none, 1)", "split(',', 1)", "split('')", "split(sep='l')",
    "splitlines()", "splitlines(true)", "startswith('a')", "startswith('b', 1)", "strip()", "strip('a')", "swapcase()",
    "title()", "upper()", "zfill(5)", "zfill()", "upper(1)", "nosuch()", "upper", "append(1)", "upper is defined",
]
METHODS = [
    "get('a')", "get('a', 5)", "get('zz')", "get('zz', 5)", "get(1)", "get([])", "get()", "items()", "items()|list",
    "keys()", "values()", "copy()", "pop('a')", "update({})", "items is callable", "keys is defined", "pop is defined",
    "count(1)", "index(1)", "index('zz')", "append(1)", "append is defined", "a", "items|string|length > 9", "x.y",
    "bit_length()", "is_integer()", "real", "imag", "numerator", "as_integer_ratio()", "start", "step", "__class__",
    "__class__ is defined", "_x", "_x is defined", "0", "1",
]
SUBSCRIPTS = [
    "[0]", "[-1]", "[1]", "[99]", "['a']", "['k']", "['items'] is defined", "[1:]", "[:-1]", "[::-1]", "[::2]", "[1:2]",
    "[-2:]", "[5:1]", "[none]", "[true]", "[1.0]", "[:'a']", "[(1, 2)]", "[[]]", "['__class__'] is defined", "[::0]",
]
OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "and", "or"]
SPECS = ["", "5", "<5", ">6", "^7", "*^9", "05", "+", " ", ".2", ".2f", "8.3f", ",", "d", "x", "b", "e", "g", "%", "s", "r",
         "010.1f", "_", "=+6", "G", "c"]
PRINTF = ["%s", "%r", "%d", "%i", "%5d", "%-5d|", "%05d", "%+d", "% d", "%.2f", "%8.3f", "%e", "%g", "%x", "%X", "%#x", "%o",
          "%c", "%%", "%5s|", "%-5s|", "%.1s", "%(ab)s", "%s %s", "%", "%q", "%.0f", "%G"]
WHOLE = Path(HERE / "rows.jinja").read_text().split("\n=====\n")


STRINGS = [v for v in VALUES if v[0] == "'" and "|float" not in v]
NUMBERS = ["7", "-7", "7.5", "-7.5", "true", "10**20", "0"]
LISTS = {"values": VALUES, "few": FEW, "strings": STRINGS, "numbers": NUMBERS}


def rows():
    """The name of a list, and a template with `@` for each of its values."""
    yield from (("values", template) for template in (
        "{{ @ }}", "{{ [@] }}", "{{ ({'k': @},) }}", "{{ '' ~ (@) ~ '|' }}", "{{ 'T' if @ else 'F' }}{{ not (@) }}",
        "{{ -(@) }}", "{{ +(@) }}",
        "{% for x in @ %}{{ loop.index }}{{ loop.last }}{{ x }},{% else %}none{% endfor %}",
        "{% for a, b in @ %}{{ a }}={{ b }};{% endfor %}", "{% set x = @ %}{{ x }}{{ x is defined }}",
        "{{ dict(@) }}", "{{ (@)() }}", "{{ range(@)|list }}", "{{ ('<b>%s</b>'|safe) % (@) }}",
    ))
    yield from (("values", "{{ (@)|%s }}" % f) for f in FILTERS)
    yield from (("values", "{{ (@) is %s }}" % t) for t in TESTS)
    yield from (("values", "{{ (@).%s }}" % m) for m in METHODS)
    yield from (("values", "{{ (@)%s }}" % s) for s in SUBSCRIPTS)
    for s in SPECS:
        yield "values", "{{ '{:%s}|{0!r}'.format(@) }}" % s
        yield "values", "{{ '{:%s}|'.format(@) }}" % s
    for p in PRINTF:
        yield "values", "{{ '%s' %% (@) }}" % p
        yield "values", "{{ '%s'|format(@) }}" % p
    yield from (("strings", "{{ (@).%s }}" % m) for m in STRING_METHODS)
    for a in FEW:
        yield from (("few", "{{ (%s) %s (@) }}" % (a, o)) for o in OPERATORS)
        yield from (("few", template % {"a": a}) for template in (
            "{{ (%(a)s) is in(@) }}{{ (%(a)s) is sameas(%(a)s) }}", "{{ (%(a)s)|join(@) }}", "{{ (%(a)s)|default(@) }}",
            "{{ [%(a)s, @]|sort }}", "{{ [%(a)s, @]|unique|list|length }}{{ [%(a)s, @]|max }}", "{{ (%(a)s)[@] }}",
            "{{ (%(a)s).split(@) }}", "{{ (%(a)s).replace(@, 'x') }}", "{{ (%(a)s).get(@, 'd') }}",
            "{{ {%(a)s: 1, @: 2}|length }}",
        ))
    for b in ("2", "-2", "0.5", "-0.3", "3", "10**18"):
        yield from (("numbers", "{{ @ %s %s }}" % (o, b)) for o in ("+", "-", "*", "/", "//", "%", "**", "<", "=="))
    yield from (("", template) for template in WHOLE)


def is_left_out(template):
    """Whether Python would compute for hours, need gigabytes, or print a set in any order."""
    huge = re.search(r"\*\*? \(?(10\*\*(18|25)|9223372036854775807)", template)
    has_set = "items()) - (" in template or template.endswith("- ({'ab': 1}.items()) }}")
    return huge or has_set or re.match(r"\{\{ range\((10\*\*|9223)", template)


ADDRESS = re.compile(r" at 0x[0-9a-f]{6,}|<(generator|built-in|bound|function|cyfunction)|LoopContext")


def too_slow(*_):
    raise TimeoutError


def text(env, template):
    """The text, or `None` where Jinja2 fails."""
    signal.setitimer(signal.ITIMER_REAL, 1)
    try:
        return env.from_string(template).render()
    except Exception:
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def outcome(template):
    """The text, 0 where Jinja2 fails, or 1 for a row that is left out."""
    if is_left_out(template):
        return 1
    computed, folded = text(UNFOLDED, template), text(FOLDED, template)
    if computed is None:
        # Where only a constant has a text, an error is right too.
        return 0 if folded is None else 1
    if computed != folded or len(computed) > 4000 or ADDRESS.search(computed + computed.lower()):
        return 1
    return computed


def main():
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, too_slow)
    lines, counts = [json.dumps(LISTS, ensure_ascii=False)], {"texts": 0, "errors": 0, "left out": 0}
    for name, template in rows():
        outcomes = [outcome(template.replace("@", value)) for value in LISTS.get(name, ("@",))]
        for one in outcomes:
            counts["left out" if one == 1 else "texts" if isinstance(one, str) else "errors"] += 1
        lines.append(json.dumps([name, template, outcomes], ensure_ascii=False, separators=(",", ":")))
    (HERE / "table.jsonl").write_text("\n".join(lines) + "\n")
    print(counts)


if __name__ == "__main__":
    main()
