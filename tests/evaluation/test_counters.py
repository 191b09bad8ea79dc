"""What Nsight Compute prints, written by hand, as the program reads it."""

import pytest

from mhla_diffusion.evaluation.counters import COUNTERS, choose_metrics, parse_counters, summary

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
    '"Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"'
)


def line(number: int, kernel: str, metric: str, unit: str, value: str) -> str:
    place = f'"{number}","71","python3","host","{kernel}","1","7","(256, 1, 1)","(1800, 1, 1)","0","9.0"'
    return f'{place},"Command line profiler metrics","{metric}","{unit}","{value}"'


CSV = "\n".join(
    [
        "==PROF== Connected to process 71 (python3)",
        "compiling, and a line with \"ID\" in it",
        '==PROF== Profiling "mix_kernel": 0%....50%....100% - 4 passes',
        HEAD,
        line(0, "mix_kernel", "gpu__time_duration.sum", "ns", "30,720"),
        line(0, "mix_kernel", "dram__bytes.sum", "byte", "118,000,128"),
        line(0, "mix_kernel", "lts__t_sector_hit_rate.pct", "%", "61.25"),
        line(1, "read_out_kernel(float *, int)", "gpu__time_duration.sum", "ns", "60000"),
        line(1, "read_out_kernel(float *, int)", "dram__bytes.sum", "byte", "n/a"),
        line(1, "read_out_kernel(float *, int)", "lts__t_sector_hit_rate.pct", "%", "(!) n/a"),
        "a line that the program printed at its end",
    ]
)  # fmt: skip
LAUNCHED = [
    {"name": "wan", "step": "mix", "kernel": "mix_kernel"},
    {"name": "wan", "step": "read_out", "kernel": "read_out_kernel"},
]


def test_metrics_are_gathered_by_launch():
    first, second = parse_counters(CSV)
    assert first == {
        "kernel": "mix_kernel",
        "grid": "(1800, 1, 1)",
        "block": "(256, 1, 1)",
        "metrics": {
            "gpu__time_duration.sum": 30720.0,
            "dram__bytes.sum": 118000128.0,
            "lts__t_sector_hit_rate.pct": 61.25,
        },
    }
    assert second["kernel"] == "read_out_kernel"
    assert second["metrics"]["dram__bytes.sum"] is second["metrics"]["lts__t_sector_hit_rate.pct"] is None


def test_without_a_table_there_are_no_kernels():
    assert parse_counters("==ERROR== ERR_NVGPUCTRPERM: no permission\n") == parse_counters("") == []


def test_counters_get_our_names_a_bandwidth_and_the_step():
    chosen = {"time_ns": "gpu__time_duration.sum", "dram_bytes": "dram__bytes.sum", "registers": "launch__x"}
    mix, read_out = summary(parse_counters(CSV), chosen, LAUNCHED)
    assert (mix["name"], mix["step"], mix["registers"]) == ("wan", "mix", None)
    assert mix["dram_gb_per_s"] == pytest.approx(118000128 / 30720)
    assert read_out["step"] == "read_out" and "dram_gb_per_s" not in read_out
    # When other kernels were launched than were measured, nothing is said about steps.
    assert all("step" not in row for row in summary(parse_counters(CSV), chosen, LAUNCHED[:1]))


def test_metrics_are_chosen_from_what_this_gpu_has():
    known = "Device NVIDIA H200 (GH100)\n----- \nMetric Name  Metric Type  Metric Unit\n"
    known += "\n".join(
        f"{name}  Counter  x"
        for name in ("gpu__time_duration", "dram__bytes_op_read", "sm__inst_executed_pipe_tensor_op_gmma")
    )
    chosen = choose_metrics(known)
    assert chosen == {
        "time_ns": "gpu__time_duration.sum",
        "dram_read_bytes": "dram__bytes_op_read.sum",
        "tensor_pct_of_peak": "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active",
        "registers": "launch__registers_per_thread",
    }
    certain = choose_metrics("==ERROR== no device\n")
    assert certain["time_ns"] == "gpu__time_duration.sum" and set(certain) < set(COUNTERS)
