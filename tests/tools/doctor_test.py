"""`tessera doctor` on this host: what it prints, its JSON, its exit code. Several hosts: tests/hosts/doctor_test.py."""
import json
import os
import re
import resource
import unittest

from tool import TESSERA, ToolTest, free_port

COLLECTIVES = ["all_gather", "reduce_scatter", "all_reduce", "broadcast"]


class DoctorTest(ToolTest):
    def report(self, *args, code=0, **options):
        outcome = self.run_tool("doctor", "--json", *args, **options)
        self.assertEqual(outcome.code, code, outcome)
        self.assertEqual(outcome.err, "", outcome)
        self.assert_nothing_runs()
        return json.loads(outcome.out)

    def test_json_of_two_ranks(self):
        report = self.report("--nproc", 2)
        self.assertEqual((report["ranks"], report["backend"], report["device"], report["problems"]), (2, "shm", "CPUs", 0))
        (host,) = report["hosts"]
        facts = host["facts"]
        self.assertEqual(facts["name"], os.uname().nodename)
        self.assertEqual(facts["machine_cores"], os.cpu_count())
        self.assertLessEqual(facts["cores"], len(os.sched_getaffinity(0)))
        self.assertEqual(facts["memory"], os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        shm = os.statvfs("/dev/shm")
        self.assertEqual(facts["shm"], shm.f_blocks * shm.f_frsize)
        self.assertEqual(facts["open_files"], resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        self.assertEqual(host["num_ranks"], 2)
        self.assertEqual([(one["name"], one["bytes"]) for one in report["collectives"]],
                         [(name, size) for size in (4096, 262144, 33554432) for name in COLLECTIVES])
        for one in report["collectives"]:
            self.assertGreater(one["seconds"], 0)
            self.assertAlmostEqual(one["algorithm_bytes_per_s"], one["bytes"] / one["seconds"], delta=1e-6 * one["algorithm_bytes_per_s"])
            factor = {"all_reduce": 1, "broadcast": 1}.get(one["name"], 0.5)  # 2 (n - 1) / n, 1, and (n - 1) / n
            self.assertAlmostEqual(one["bus_bytes_per_s"], factor * one["algorithm_bytes_per_s"], delta=1e-6 * one["bus_bytes_per_s"])

    def test_what_ends_the_ranks_is_said_without_the_word_warning(self):
        report = self.report("--nproc", 2, "--timeout", 0.05, code=1)
        (found,) = (one["found"] for one in report["findings"] if one["check"] == "ranks")
        self.assertTrue(found.startswith("--timeout: the run has taken as long as it may"), found)

    def test_one_rank_measures_nothing(self):
        outcome = self.run_tool("doctor")
        self.assert_succeeded(outcome)
        self.assertLessEqual(max(map(len, outcome.out.splitlines())), 80)
        self.assertTrue(outcome.out.startswith(os.uname().nodename + "\n"), outcome)
        for check in ("cores", "memory", "/dev/shm", "open files", "GPUs", "libtorch", "tessera"):
            self.assertRegex(outcome.out, rf"(?m)^  (ok     |warning)  {check} ", outcome)
        self.assertNotRegex(outcome.out, "|".join(COLLECTIVES))
        self.assertIn("--nproc N and --hostfile FILE start ranks", outcome.out)
        self.assertRegex(outcome.out, r"\nno problems, (no|\d+) warnings?\n$")

    def test_too_few_open_files(self):
        """A hard limit of open files below what the ranks need is a problem, and says what to do."""
        outcome = self.run_tool("-c", f"ulimit -n 24; exec '{TESSERA}' doctor --json --nproc 2", program="bash")
        self.assertEqual(outcome.code, 1, outcome)
        problems = {finding["check"]: finding for finding in json.loads(outcome.out)["findings"] if finding["level"] == "problem"}
        self.assertIn("24; a rank needs about 28", problems["open files"]["found"])
        self.assertIn("ulimit -n 228", problems["open files"]["advice"])

    def test_ranks_of_another_launcher(self):
        """Started as ranks, the first one prints for all."""
        ranks = self.start_by_hand([2, 2], "doctor", "--json")
        first, second = [self.finish(rank) for rank in ranks]
        self.assertEqual((first.code, second.code, second.out), (0, 0, ""), f"{first}{second}")
        report = json.loads(first.out)
        self.assertEqual((report["ranks"], len(report["hosts"]), len(report["collectives"])), (2, 1, 12))

    def test_ranks_that_do_not_meet(self):
        """The host is checked all the same. The other host, which does not come, is a launcher that is never started."""
        report = self.report("--nproc", 1, "--nnodes", 2, "--node-rank", 0, "--master-addr", "127.0.0.1", "--master-port", free_port(),
                             "--rendezvous-timeout", 2, code=1)
        (problem,) = [finding for finding in report["findings"] if finding["level"] == "problem"]
        self.assertEqual(problem["check"], "ranks")
        self.assertRegex(problem["found"], r"rank 1")
        self.assertTrue(report["hosts"][0]["has_facts"])
        self.assertEqual(report["collectives"], [])

    def test_what_ssh_says_is_not_utf8(self):
        self.write("hosts", "other slots=1\n")
        self.write("ssh", "#!/bin/sh\nprintf 'ssh: caf\\351\\n' >&2\nexit 255\n")
        (self.folder / "ssh").chmod(0o755)
        report = self.report("--hostfile", "hosts", code=1, env={"PATH": f"{self.folder}:{os.environ['PATH']}"})
        self.assertEqual(report["hosts"][0]["unreachable"], "ssh: caf\ufffd")

    def test_flags_are_those_of_launch(self):
        self.assert_one_error(self.run_tool("doctor", "--launcher", "ssh"), "--launcher ssh: expected --hostfile FILE")
        words = {name: set(re.findall(r"(?<![\w-])--[a-z][\w-]*", self.run_tool(name, "--help").out)) for name in ("launch", "doctor")}
        self.assertEqual(words["doctor"] - words["launch"], {"--json"})
        self.assertEqual(words["launch"] - words["doctor"], set())


if __name__ == "__main__":
    unittest.main()
