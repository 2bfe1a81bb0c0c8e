"""Ranks that die and launchers that get a signal, in the middle of training."""
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import time
import unittest

from tool import NOISE, TESSERA, TIMEOUT_S, ToolTest, free_port


class FailureTest(ToolTest):
    def setUp(self):
        super().setUp()
        self.name = self.write("config.json", self.config(
            trainer={"max_steps": 1000000, "output_dir": "run", "device": "cpu"}, zero_optimization={"stage": 2}))

    def start_training(self, num_ranks=2, *args):
        """The launcher, once its ranks have done some steps, and the ranks' process ids."""
        launcher = self.start("train", self.name, "--nproc", num_ranks, *args)
        self.wait_for_steps(launcher)
        ranks = {int(environment["RANK"]): pid for pid, environment in self.marked().items() if "RANK" in environment}
        self.assertEqual(sorted(ranks), list(range(num_ranks)))
        return launcher, ranks

    def test_rank_0_is_killed(self):
        launcher, ranks = self.start_training(3)
        os.kill(ranks[0], signal.SIGKILL)
        outcome = self.finish(launcher)
        self.assertEqual(outcome.code, 137, outcome)
        errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
        self.assertEqual(len(errors), 1, outcome)
        self.assertIn("rank 0 of 3 failed first: SIGKILL", errors[0])
        # Rank 0 prints to the launcher's terminal; the logs of the others are kept, as they have an error.
        self.assertIn("the logs of ranks", outcome.err)
        self.assertTrue(any(self.tmp.iterdir()), outcome)
        self.assertNotRegex(outcome.err, NOISE, outcome)
        self.assertFalse((self.folder / "run" / "all_results.json").exists())
        self.assert_nothing_runs()

    # ---------------------------------------------------------------------------------- signals that ask it to end

    def check_stopped(self, outcome, *resume):
        """The run has finished the step, saved it, and said how to resume; `resume`: flags with which it is resumed from there, without a
        step that is missing or repeated."""
        self.assertEqual(outcome.code, 0, outcome)  # one that was killed after the grace would have another
        self.assertNotRegex(outcome.err, f"error:|{NOISE.pattern}", outcome)
        last_step = self.lines_of_metrics()[-1]["step"]
        self.assertRegex(outcome.out, rf"stopped  saved in run/checkpoints/global_step{last_step}\n +resume with: .*--resume")
        self.assertFalse((self.folder / "run" / "all_results.json").exists())
        self.assert_nothing_runs()
        if resume:
            self.resume_after_stop(*resume)

    def resume_after_stop(self, *args):
        last_step = self.lines_of_metrics()[-1]["step"]
        resumed = self.run_tool("train", self.name, "--resume", *args, "--set", f"trainer.max_steps={last_step + 5}")
        self.assertEqual(resumed.code, 0, resumed)
        self.assertIn("resuming after step ", resumed.out)
        steps = [record["step"] for record in self.lines_of_metrics() if "loss" in record]
        self.assertEqual(steps, list(range(1, last_step + 6)))

    def test_interrupt(self):
        """Ctrl-C, which ends attempts to restart too."""
        launcher, _ = self.start_training(2, "--max-restarts", 3)
        launcher.send_signal(signal.SIGINT)
        outcome = self.finish(launcher)
        self.check_stopped(outcome, "--nproc", 2)
        self.assertNotIn("restart", outcome.err)

    def test_terminate_and_preempt(self):
        """Slurm's --signal=USR1@60 may come to the launcher and to the ranks, and then SIGTERM to all."""
        for sent in ((signal.SIGTERM,), (signal.SIGUSR2,), (signal.SIGUSR1, signal.SIGTERM)):
            with self.subTest(sent):
                launcher, ranks = self.start_training(2)
                if len(sent) > 1:
                    for process in (*ranks.values(), launcher.pid, *ranks.values()):
                        os.kill(process, sent[0])
                launcher.send_signal(sent[-1])
                outcome = self.finish(launcher)
                self.check_stopped(outcome)
                if len(sent) > 1:
                    self.assertIn("SIGUSR1: 2 ranks have 30 s to end", outcome.err)
                shutil.rmtree(self.folder / "run")

    def test_a_rank_by_hand_waits_for_the_others(self):
        """The launcher says so, and a signal ends it at once."""
        for rank, words in ((0, "for rank 1 of 2"), (1, "for rank 0 to serve the rendezvous at 127.0.0.1:")):
            by_hand = self.environment(RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
            with self.start("train", self.name, env=by_hand) as process:
                line = process.stderr.readline()  # after 5 s
                self.assertIn(f"rank {rank} waits ", line)
                self.assertIn(words, line)
                process.send_signal(signal.SIGTERM)
                self.assertEqual(process.wait(TIMEOUT_S), -signal.SIGTERM)

    def test_signals_without_a_launcher(self):
        for sent in ((signal.SIGHUP,), (signal.SIGQUIT,), (signal.SIGUSR1, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM), (signal.SIGXCPU,)):
            with self.subTest(sent):
                process = self.start("train", self.name)
                self.wait_for_steps(process)
                for number in sent:
                    process.send_signal(number)
                self.check_stopped(self.finish(process))
                shutil.rmtree(self.folder / "run")

    def test_the_terminal_is_closed(self):
        """The terminal of a run is closed, and nothing can be printed any more."""
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(self.folder)
            os.execve(TESSERA, [TESSERA, "train", self.name], self.environment())
        give_up = time.monotonic() + TIMEOUT_S
        while self.count_steps() < 3:
            self.assertLess(time.monotonic(), give_up, "the run does not start")
            if select.select([terminal], [], [], 0.02)[0]:
                os.read(terminal, 65536)
        os.close(terminal)  # the kernel sends SIGHUP
        os.waitpid(pid, 0)
        self.resume_after_stop()

    def test_nohup(self):
        process = self.start("train", self.name, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
        self.wait_for_steps(process)
        process.send_signal(signal.SIGHUP)
        self.wait_for_steps(process, self.count_steps() + 3)
        process.terminate()
        self.assertEqual(self.finish(process).code, 0)

    def check_refused(self, first_pid, *args):
        before = (self.folder / "run" / "config.json").read_bytes()
        outcome = self.run_tool("train", self.name, *args)
        self.assertEqual(outcome.code, 1, outcome)
        errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
        self.assertEqual(len(errors), 1, outcome)
        for part in ("trainer.output_dir: run is in use", f"process {first_pid} on {socket.gethostname()}", "another folder"):
            self.assertIn(part, errors[0])
        self.assertEqual((self.folder / "run" / "config.json").read_bytes(), before)

    def test_a_second_run_in_the_folder(self):
        """A second run is refused while the first one exists, stopped or not, and may start once the first was killed."""
        _, ranks = self.start_training()
        self.check_refused(ranks[0])
        os.kill(ranks[0], signal.SIGSTOP)
        for args in (["--set", "trainer.overwrite_output_dir=true"], ["-n", 2, "--resume"]):
            self.check_refused(ranks[0], *args)
        self.assertNotIn("in use", self.run_tool("inspect", "run/checkpoints").err)  # looking is allowed; there may be no checkpoint yet
        os.kill(ranks[0], signal.SIGKILL)
        shutil.rmtree(self.folder / "run" / "checkpoints", ignore_errors=True)
        self.assertTrue((self.folder / "run" / ".lock").exists())
        outcome = self.run_tool("train", self.name, "--set", "trainer.max_steps=5")
        self.assertEqual(outcome.code, 0, outcome)
        self.assertFalse((self.folder / "run" / ".lock").exists())

    def test_a_full_disk(self):
        """A full disk is reported once, with the last good checkpoint; with more room the run resumes from there."""
        (self.folder / "run").mkdir()
        train = f"'{TESSERA}' train {self.name} --nproc 2 --set trainer.max_steps=60 --set trainer.save_every_steps=4 --set steps_per_print=20"
        script = f"mount -t tmpfs -o size=700k tmpfs run || exit 77; {train}; echo code $?; mount -o remount,size=50m run && exec {train} --resume"
        outcome = self.run_tool("-m", "sh", "-c", script, program="unshare")
        if outcome.code == 77 or "unshare" in outcome.err:
            self.skipTest("mounting a small tmpfs is not allowed here")
        self.assertEqual(outcome.code, 0, outcome)
        first, resumed = outcome.out.split("code 1\n")
        lines = [line for line in outcome.err.splitlines() if "No space left on device" in line]
        self.assertEqual([line.split(": ")[0] for line in lines], ["warning", "error"], outcome)
        for line in lines:
            safe = re.search(r"; (run/checkpoints/global_step\d+) is complete: the same command and --resume continue from it$", line)
            self.assertTrue(safe, outcome)
        self.assertIn(f"from {safe[1]}\n", resumed)
        for log in self.tmp.glob("tessera_*"):
            shutil.rmtree(log)

    def test_the_connection_to_a_host_breaks(self):
        """As sshd does it: the launcher's input ends, and nobody takes the output of its ranks. They have time to save, and may write."""
        script = 'trap "echo saving; echo more >&2; sleep 0.3; echo; touch saved_$RANK; exit 0" TERM; echo ready; touch ready_$RANK; while :; do sleep 0.1; done'
        process = self.start("launch", "-n", 2, "--", "sh", "-c", script, stdin=subprocess.PIPE, env={"TESSERA_LAUNCH_AGENT": "stdin"})
        self.assertEqual(process.stdout.readline(), "ready\n")
        while not all((self.folder / f"ready_{rank}").exists() for rank in (0, 1)):
            time.sleep(0.02)
        for stream in (process.stdout, process.stderr, process.stdin):
            stream.close()
        self.assertEqual(process.wait(20), 0)
        self.assertTrue(all((self.folder / f"saved_{rank}").exists() for rank in (0, 1)))
        self.assert_nothing_runs()

    def test_a_signal_for_the_ranks_of_a_host(self):
        """As the launcher of a run sends it by ssh: it comes at once, and the run goes on."""
        script = "trap 'echo more; touch usr_$RANK' USR1; touch ready_$RANK; while [ ! -e usr_0 -o ! -e usr_1 ]; do sleep 0.1; done"
        process = self.start("launch", "-n", 2, "--", "sh", "-c", script, stdin=subprocess.PIPE, env={"TESSERA_LAUNCH_AGENT": "stdin"})
        while not all((self.folder / f"ready_{rank}").exists() for rank in (0, 1)):
            time.sleep(0.02)
        process.stdin.write(chr(ord("@") + signal.SIGUSR1))
        process.stdin.flush()
        self.assertEqual(process.wait(20), 0)
        self.assertIn("SIGUSR1: passed on to 2 ranks", self.finish(process).err)


if __name__ == "__main__":
    unittest.main()
