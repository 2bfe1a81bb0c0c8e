"""`deepspeed.monitor.monitor`: the monitors of a configuration: tensorboard, csv_monitor, jsonl_monitor and mlflow."""
import json
from collections.abc import Iterable
from typing import Any

from tessera import _engine, arguments, comm, errors, reports


class MonitorMaster:
    """Writes values, on rank 0.

    Parameters
    ----------
    monitor_config : engine, or `DeepSpeedConfig(...).monitor_config`
        An engine's values go into the same records as those that it writes itself. A configuration's go into records of their own, in the
        folder job_name_2 where an engine of this process writes to job_name; the other way round where they are made before the engine.
    """

    def __init__(self, monitor_config: Any) -> None:
        self._reports = getattr(monitor_config, "_reports", None)
        self._monitors = None
        if isinstance(monitor_config, _engine.Config) and comm.get_rank() == 0:
            self._monitors = reports.open_monitors(monitor_config, reports.take_place(self, monitor_config))
        resolved = json.loads(monitor_config.resolved) if isinstance(monitor_config, _engine.Config) else monitor_config.config
        self.enabled = reports.has_monitors(resolved)

    def write_events(self, event_list: Iterable[tuple[str, Any, int]]) -> None:
        """[(name, number, samples or step)]. Does nothing on other ranks than 0, and without a monitor in the configuration."""
        if not self.enabled or comm.get_rank() != 0:
            return
        if self._reports is None and self._monitors is None:
            raise errors.Error("write_events(): the monitors are closed; expected the call before close()")
        write = self._reports.write if self._monitors is None else self._monitors.scalars
        events = [(arguments.text(name, "write_events(): a name"), arguments.number(value, f"write_events(): the value of {name}"),
                   arguments.integer(step, f"write_events(): the step of {name}", -2**63)) for name, value, step in event_list]
        for name, value, step in events:
            write(step, [(name, value)])

    def close(self) -> None:
        """End the records of a configuration's monitors; an engine ends its own."""
        if self._monitors is not None:
            self._monitors.close(False)
            self._monitors = None
            reports.free_place(self)
