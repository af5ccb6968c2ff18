"""Check the coverage of `edgellm/cache` and of the policy plugins, lines and branches: 95 % together, 90 % each file.

coverage run --branch ... -m pytest ... && python tools/coverage_floor.py
"""

from __future__ import annotations

import json
import subprocess
import sys

TOTAL, EACH = 95.0, 90.0


def main() -> int:
    command = [sys.executable, "-m", "coverage", "json", "--quiet", "-o", "-"]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    total = report["totals"]["percent_covered"]
    low = {name: file["summary"]["percent_covered"] for name, file in report["files"].items()}
    low = {name: percent for name, percent in low.items() if percent < EACH}
    print(f"coverage of the cache and the policies: {total:.1f} % of lines and branches, {len(report['files'])} files")
    for name, percent in sorted(low.items()):
        print(
            f"{name}: {percent:.1f} %, at least {EACH:.0f} % is asked for; `coverage report -m` shows what is missing"
        )
    if total < TOTAL:
        print(f"{TOTAL:.0f} % is asked for; `coverage report -m` shows what is missing")
    return 1 if low or total < TOTAL else 0


if __name__ == "__main__":
    sys.exit(main())
