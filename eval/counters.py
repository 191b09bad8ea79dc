"""Hardware counters of the operator's kernels: each step of the named rows once under Nsight Compute (`ncu`).

    python eval/counters.py --rows "wan 480x800x81" "sana 4K" --out eval/results/op_counters_h200.json

Needs `ncu` and the right to read counters. Clocks are left alone; ncu empties the caches before each kernel, so hits
in L2 are those within a kernel.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from mhla_diffusion.evaluation.counters import choose_metrics, parse_counters, summary
from mhla_diffusion.evaluation.kernel_report import launches
from mhla_diffusion.evaluation.operator_cases import CASES, Inputs
from mhla_diffusion.evaluation.timing import about
from mhla_diffusion.evaluation.tune_operator import kernels_of, stages

ROWS = {case.name: case for case in CASES}
DEFAULT = ("wan 480x800x81", "dit 512")


def child(rows: list[str], noted: Path) -> None:
    """What ncu looks at: every step of the rows, compiled before the profiler is told to begin."""
    launched = []
    for name in rows:
        calls = stages(Inputs(ROWS[name], torch.device("cuda"), torch.bfloat16, 0))
        for step in kernels_of(ROWS[name]):
            calls[step]()
            torch.cuda.synchronize()
            with launches() as found:
                torch.cuda.profiler.start()
                calls[step]()
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()
            launched += [{"name": name, "step": step, "kernel": launch["kernel"]} for launch in found]
    noted.write_text(json.dumps(launched))


def find_ncu() -> str:
    places = (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda")
    found = shutil.which("ncu") or next(
        filter(None, [shutil.which(f"{place}/bin/ncu") for place in places]), None
    )
    if found is None:
        raise SystemExit("ncu (Nsight Compute) not found: it comes with the CUDA toolkit; put it on PATH")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Read hardware counters of the operator's kernels.")
    parser.add_argument(
        "--rows",
        nargs="+",
        choices=ROWS,
        default=list(DEFAULT),
        metavar="ROW",
        help="as mhla bench op names them",
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/op_counters.json"), metavar="FILE")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.rows, options.child)
        return
    ncu = find_ncu()
    known = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True).stdout
    chosen = choose_metrics(known)
    with tempfile.TemporaryDirectory() as folder:
        noted, log = Path(folder) / "launched.json", Path(folder) / "ncu.csv"
        command = [
            ncu, "--csv", "--log-file", str(log), "--clock-control", "none", "--profile-from-start", "off",
            "--print-units", "base", "--kernel-name", "regex:_kernel$", "--metrics", ",".join(chosen.values()),
            sys.executable, __file__, "--child", str(noted), "--rows", *options.rows,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        text = log.read_text() if log.is_file() else ""
        kernels = parse_counters(text)
        if not kernels:
            said = [
                line
                for line in (text + done.stdout + done.stderr).splitlines()
                if re.search("ERROR|Error|error", line)
            ]
            raise SystemExit(
                "ncu read no counters: " + " ".join(said[:5] or ["it printed nothing about why"])
            )
        launched = json.loads(noted.read_text()) if noted.is_file() else []
    # Kernels of torch between ours are not reported.
    ours = {row["kernel"] for row in launched}
    rows = summary(
        [kernel for kernel in kernels if kernel["kernel"] in ours] if ours else kernels, chosen, launched
    )
    result = {
        **about(torch.device("cuda")), "metrics": chosen, "cache": "emptied before each kernel", "kernels": rows,
    }  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print({name: round(x, 2) if isinstance(x, float) else x for name, x in row.items()})
    print(f"{options.out} written")


if __name__ == "__main__":
    main()
