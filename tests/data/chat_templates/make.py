"""Writes expected.jsonl: the templates of this folder, rendered by Jinja2 with the settings of transformers.

Run `python3 make.py` with Jinja2 3.1.6. A row is a template, a case of cases.json, and the text, or null where Jinja2 fails.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(HERE.parent / "jinja"))

from make import environment  # noqa: E402


def main():
    env, lines = environment(), []
    cases = json.loads((HERE / "cases.json").read_text())
    for path in sorted(HERE.glob("*.jinja")):
        template = env.from_string(path.read_text())
        for name, variables in cases.items():
            try:
                text = template.render(bos_token="<s>", eos_token="</s>", **variables)
            except Exception:
                text = None
            lines.append(json.dumps([path.stem, name, text], ensure_ascii=False, separators=(",", ":")))
    (HERE / "expected.jsonl").write_text("\n".join(lines) + "\n")
    print(len(lines), "rows,", sum(line.endswith(",null]") for line in lines), "errors")


if __name__ == "__main__":
    main()
