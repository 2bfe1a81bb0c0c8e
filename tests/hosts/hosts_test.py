"""The same small training under every launcher, with the real programs: torchrun, mpirun, srun, ssh, pdsh. The losses are those of
`tessera train --nproc`, to the bit. (On two hosts with two ranks, whose sums have one order; with more, Gloo's between hosts
differs from that of shared memory, and the launchers are compared with each other.)

    hosts_test.py [TEST...]        TESSERA and TORCHRUN name the programs
"""
import glob
import re
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import hosts_case  # noqa: E402
from hosts_case import TORCHRUN, HostsCase, needs, testbed  # noqa: E402
from tool import ROOT, TESSERA  # noqa: E402


class HostsTest(HostsCase):
    # --------------------------------------------------------- under launchers that start every rank themselves

    @needs(TORCHRUN)
    def test_torchrun(self):
        self.assertEqual(self.train("torchrun", TORCHRUN, "--no-python", "--nproc-per-node", 3, TESSERA, "train", "CONFIG"),
                         self.expected(3))

    @needs(TORCHRUN, "ssh", "sshd")
    def test_torchrun_on_two_hosts(self):
        """Two ranks and one, as the launcher starts them by ssh."""
        config = self.write_config("torchrun2")
        ends = []
        for node, (host, nproc) in enumerate((("n1", 2), ("n2", 1))):
            program, *words = [*self.bed.on(host), TORCHRUN, "--nnodes", 2, "--node-rank", node, "--nproc-per-node", nproc,
                               "--master-addr", "n1", "--master-port", 29611, "--no-python", TESSERA, "train", config]
            ends.append(self.start(*words, program=program))
        for outcome in [self.finish(process) for process in ends]:
            self.assertEqual(outcome.code, 0, outcome)
        losses = self.train("ssh3", TESSERA, "train", "CONFIG", "--hostfile", "hosts", *self.ssh_flags())
        self.assertEqual(losses, self.losses("run_torchrun2"))

    @needs("mpirun")
    def test_mpirun(self):
        losses = self.train("mpirun", "mpirun", "--oversubscribe", "--bind-to", "none", "-n", 3, TESSERA, "train", "CONFIG")
        self.assertEqual(losses, self.expected(3))

    @needs("mpirun", "sshd")
    def test_mpirun_on_two_hosts(self):
        losses = self.train("mpirun2", "mpirun", "--bind-to", "none", "--host", "n1:1,n2:1", "-n", 2, "-x", "OMP_NUM_THREADS",
                            "-x", "MASTER_ADDR=n1", TESSERA, "train", "CONFIG")
        self.assertEqual(losses, self.expected())
        outcome = self.train("unsaid", "mpirun", "--bind-to", "none", "--host", "n1:1,n2:1", "-n", 2, TESSERA, "train", "CONFIG", code=1)
        self.assertIn("MASTER_ADDR is not set, and Open MPI does not say where rank 0 is", outcome.err)

    @needs("mpirun.mpich")
    def test_mpich(self):
        losses = self.train("mpich", "mpirun.mpich", "-n", 3, TESSERA, "train", "CONFIG")
        self.assertEqual(losses, self.expected(3))

    @needs("mpirun.mpich", "ssh", "sshd")
    def test_mpich_on_two_hosts(self):
        hydra = ["mpirun.mpich", *self.mpich_flags(), "-hosts", "n1,n2", "-ppn", 1, "-n", 2]
        losses = self.train("mpich2", *hydra, "-genv", "MASTER_ADDR", "n1", TESSERA, "train", "CONFIG")
        self.assertEqual(losses, self.expected())
        outcome = self.train("unsaid", *hydra, TESSERA, "train", "CONFIG", code=1)
        self.assertIn("MASTER_ADDR is not set, and Hydra does not say where rank 0 is", outcome.out + outcome.err)
        self.assertIn("(mpirun -genv MASTER_ADDR HOST)", outcome.out + outcome.err)

    @needs("mpirun.mpich", "ssh", "sshd")
    def test_mpich_starts_one_launcher_a_host(self):
        """Two ranks and two; the losses are those over ssh."""
        losses = self.train("mpich4", "mpirun.mpich", *self.mpich_flags(), "-hosts", "n1,n2", "-ppn", 1, "-n", 2, "-genv", "MASTER_ADDR", "n1",
                            TESSERA, "train", "CONFIG", "--nproc", 2)
        self.write("four", "n1 slots=2\nn2 slots=2\n")
        self.assertEqual(losses, self.train("ssh4", TESSERA, "train", "CONFIG", "--hostfile", "four", *self.ssh_flags()))

    @needs("mpirun.mpich")
    def test_python_under_mpich(self):
        expected = [f"({rank}, 3, {rank}) [0, 1, 2] True" for rank in range(3)]
        self.assertEqual(self.check_python("mpirun.mpich", "-n", 3), expected)

    @needs("srun", "munged")
    def test_srun(self):
        losses = self.train("srun", "srun", "-N", 2, "-n", 2, TESSERA, "train", "CONFIG")
        self.assertEqual(losses, self.expected())

    @needs("srun", "munged", "ssh", "sshd")
    def test_srun_starts_one_launcher_a_host(self):
        losses = self.train("srun4", "srun", "-N", 2, "--ntasks-per-node", 1, TESSERA, "train", "CONFIG", "--nproc", 2)
        self.write("four", "n1 slots=2\nn2 slots=2\n")
        self.assertEqual(losses, self.train("ssh4", TESSERA, "train", "CONFIG", "--hostfile", "four", *self.ssh_flags()))

    @needs("sbatch", "munged")
    def test_sbatch(self):
        """In the script itself there is one rank, srun in it starts all."""
        self.write_config("alone")
        self.write_config("job")
        self.write("job.sh", f"#!/bin/bash\n'{TESSERA}' train alone.json && srun '{TESSERA}' train job.json\n")
        outcome = self.run_tool("--wait", "-N", 2, "-n", 2, "-o", "job.out", "job.sh", program="sbatch")
        self.assertEqual(outcome.code, 0, f"{outcome}\n{(self.folder / 'job.out').read_text()}")
        self.assertEqual(self.losses("run_job"), self.expected())
        self.assertEqual(self.losses("run_alone"), self.train("one", TESSERA, "train", "CONFIG"))

    @needs("sbatch", "munged")
    def test_slurm_job_of_the_gallery(self):
        gallery = ROOT / "examples" / "gallery"
        outcome = self.run_tool("--wait", "-o", self.folder / "gan.out", gallery / "slurm.sh", gallery / "gan.py", program="sbatch",
                                env={"PYTHON": sys.executable})
        said = (self.folder / "gan.out").read_text()
        self.assertEqual(outcome.code, 0, f"{outcome}\n{said}")
        self.assertIn(f"#     {said.splitlines()[-1]}\n", (gallery / "slurm.sh").read_text())

    def check_python(self, *launcher):
        """The Python package in ranks of a launcher: its place before it joins, and in the group."""
        self.write("group.py", "import sys\nfrom tessera import comm\nbefore = comm.get_rank(), comm.get_world_size(), comm.get_local_rank()\n"
                   "line = f'{before} {comm.all_gather(comm.get_rank())} {comm.get_rank() == before[0]}'\n"
                   "sys.stdout.write(line + '\\n')  # at once: the launcher mixes what ranks write\n")
        outcome = self.run_tool(*launcher[1:], sys.executable, "group.py", program=launcher[0])
        self.assertEqual(outcome.code, 0, outcome)
        return sorted(outcome.out.splitlines())

    @needs("mpirun")
    def test_python_under_mpirun(self):
        expected = [f"({rank}, 3, {rank}) [0, 1, 2] True" for rank in range(3)]
        self.assertEqual(self.check_python("mpirun", "--oversubscribe", "--bind-to", "none", "-n", 3), expected)

    @needs("srun", "munged")
    def test_python_under_srun(self):
        places = [(0, 0), (1, 1), (2, 0)]  # two tasks on n1, one on n2
        expected = [f"({rank}, 3, {local}) [0, 1, 2] True" for rank, local in places]
        self.assertEqual(self.check_python("srun", "-N", 2, "-n", 3, "--overcommit"), expected)

    # ------------------------------------------------------------------------------- driven by --launcher

    def check_launcher(self, launcher, *flags):
        losses = self.train(launcher, TESSERA, "train", "CONFIG", "--hostfile", "pair", "--launcher", launcher, *flags)
        self.assertEqual(losses, self.expected())
        # A rank on the second host dies: one line names the host and the rank.
        script = self.write("fail.sh", 'if [ "$RANK" = 2 ]; then echo "error: rank $RANK is out of luck" >&2; exit 9; fi; sleep 3600')
        outcome = self.run_tool("launch", "--hostfile", "hosts", "--launcher", launcher, "--save-grace", 2, *flags, "--", "sh", script)
        self.assertEqual(outcome.code, 9, outcome)
        self.assertRegex(outcome.err, r"(?m)^error: rank 2 of 3 failed first: exit code 9, on host n2 at [\d:.]+; last error: error: rank 2 is out of luck$")
        self.check_interrupt(launcher, *flags)
        self.check_restart(launcher, *flags)

    def check_restart(self, launcher, *flags):
        """A rank on the second host fails once: all ranks of both hosts are started again."""
        script = self.write("again.sh", 'n=$TORCHELASTIC_RESTART_COUNT; if [ $n = 1 ]; then echo $WORLD_SIZE > again_$RANK; exit 0; fi; '
                            'if [ "$RANK" = 2 ]; then exit 9; fi; sleep 3600')
        outcome = self.run_tool("launch", "--hostfile", "hosts", "--launcher", launcher, "--max-restarts", 1, "--save-grace", 2, *flags, "--", "sh", script)
        self.assertEqual(outcome.code, 0, outcome)
        self.assertIn("rank 2 of 3 failed first: exit code 9, on host n2", outcome.err)
        self.assertIn("restart 1 of 1: 3 ranks\n", outcome.err)
        self.assertEqual([(self.folder / f"again_{rank}").read_text() for rank in range(3)], ["3\n"] * 3)

    def check_interrupt(self, launcher, *flags):
        """Ctrl-C: the ranks of both hosts save, and the launcher waits for them."""
        script = self.write("save.sh", 'trap "sleep 2; echo saved > saved_$RANK; exit 0" TERM; touch ready_$RANK; while :; do sleep 0.1; done')
        process = self.start("launch", "--hostfile", "hosts", "--launcher", launcher, *flags, "--", "sh", script)
        self.wait_for_files("ready_0", "ready_1", "ready_2")
        process.send_signal(signal.SIGINT)
        outcome = self.finish(process)
        if launcher != "pdsh":  # which ends its ssh processes, and cannot wait for the hosts
            self.assertEqual(outcome.code, 0, outcome)
        self.wait_for_files("saved_0", "saved_1", "saved_2", seconds=60 if launcher == "pdsh" else 0)

    @needs("ssh", "sshd")
    def test_ssh(self):
        self.check_launcher("ssh", *self.ssh_flags())

    @needs("ssh", "sshd")
    def test_ssh_after_a_failure_does_not_wait_for_ranks_to_save(self):
        """Rank 2 does not end by SIGTERM: it has the seconds after a failure, not those to save. The failure named is the other's."""
        script = self.write("stubborn.sh", 'if [ "$RANK" = 0 ]; then while [ ! -e ready ]; do sleep 0.1; done; exit 9; fi; '
                            '[ "$RANK" = 2 ] && { trap "" TERM; touch ready; }; while :; do sleep 0.1; done')
        outcome = self.run_tool("launch", "--hostfile", "hosts", "--save-grace", 3600, *self.ssh_flags(), "--", "sh", script)
        self.assertEqual(outcome.code, 9, outcome)
        self.assertRegex(outcome.err, r"(?m)^error: rank 0 of 3 failed first: exit code 9, on host n1")

    @needs("pdsh", "ssh", "sshd")
    def test_pdsh(self):
        self.check_launcher("pdsh")

    @needs("mpirun", "sshd")
    def test_openmpi(self):
        self.check_launcher("openmpi")

    @needs("srun", "munged")
    def test_slurm(self):
        self.check_launcher("slurm", "--launcher-args", "--overcommit")

    @needs("ssh", "sshd")
    def test_include(self):
        """A slot of a host, and all of the other."""
        flags = ["--hostfile", "hosts", *self.ssh_flags()]
        self.write("place.sh", "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $(hostname) $CUDA_VISIBLE_DEVICES > place_$RANK")
        outcome = self.run_tool("launch", *flags, "--include", "n1:1@n2", "--", "sh", "place.sh")
        self.assertEqual(outcome.code, 0, outcome)
        self.assertEqual([(self.folder / f"place_{rank}").read_text() for rank in (0, 1)], ["0/2 0/1 n1 1\n", "1/2 0/1 n2\n"])

    @needs("ssh", "sshd")
    def test_ssh_is_refused(self):
        outcome = self.run_tool("launch", "--hostfile", "hosts", "--", "true")  # without the key
        self.assertEqual(outcome.code, 255, outcome)
        self.assertRegex(outcome.err, r"error: ssh to n[12] failed: exit code 255; what it said is above")

    @needs("ssh", "sshd")
    def test_killed_launcher_leaves_nothing(self):
        """The ranks have time to save, and may write while they do."""
        script = self.write("hang.sh", 'trap "echo saving; sleep 1; echo; touch saved_$RANK; exit 0" TERM; touch ready_$RANK; while :; do sleep 0.1; done')
        process = self.start("launch", "--hostfile", "hosts", "--max-restarts", 1, *self.ssh_flags(), "--", "sh", script)
        self.wait_for_files("ready_0", "ready_1", "ready_2")
        self.assertEqual(len(self.memory_folders()), 2)
        process.kill()
        self.finish(process)
        self.wait_for_files("saved_0", "saved_1", "saved_2")
        self.wait_until(lambda: not [name for pid, name in testbed.processes().items() if name in ("sleep", "sh", "tessera") and pid not in self.before])
        self.assertEqual(self.memory_folders(), [])

    # ------------------------------------------------------------------------------------------- restarts

    def memory_folders(self):
        return sorted(glob.glob("/dev/shm/tessera_memory_" + "[0-9a-f]" * 32 + "_*"))

    def kill_n2_and_finish(self, name, *flags, comes_back, **trainer):
        """Trains 300 steps over ssh with a checkpoint every 10, and kills host n2, with its memory, after some; the outcome."""
        config = self.config()
        config["trainer"].update({"output_dir": f"run_{name}", "num_threads": 1, "max_steps": 300, "save_every_steps": 10, **trainer})
        config["model"]["dropout"] = 0  # each rank draws its own
        config = self.write(f"{name}.json", config)
        process = self.start("train", config, *flags, *self.ssh_flags())
        metrics = self.folder / f"run_{name}" / "metrics.jsonl"
        self.wait_until(lambda: metrics.exists() and metrics.read_text().count('"loss"') > 20, 60)
        self.num_recorded = metrics.read_text().count('"loss"')
        (memory,) = [folder for folder in self.memory_folders() if folder.endswith("_1")]
        self.bed.kill_host("n2")
        shutil.rmtree(memory, ignore_errors=True)
        self.assertIsNone(process.poll(), "the run has ended before")
        if comes_back:
            self.bed.start_sshd_on("n2")
        outcome = self.finish(process)
        if not comes_back:
            self.bed.start_sshd_on("n2")
        self.assertEqual(outcome.code, 0, outcome)
        self.assertEqual(outcome.out.count("resuming after step"), 1, outcome)
        steps = [record["step"] for record in self.lines_of_metrics(f"run_{name}") if "loss" in record]
        self.assertEqual(steps, list(range(1, 301)))
        self.assertEqual(self.memory_folders(), [])
        return outcome

    def undisturbed(self, name, *flags):
        outcome = self.run_tool("train", f"{name}.json", "--set", f"trainer.output_dir=calm_{name}", *flags)
        self.assertEqual(outcome.code, 0, outcome)
        return self.losses(f"calm_{name}")

    @needs("ssh", "sshd")
    def test_restart_on_a_host_that_was_killed(self):
        outcome = self.kill_n2_and_finish("restart", "--hostfile", "pair", "--max-restarts", 1, comes_back=True)
        self.assertIn("restart 1 of 1: 2 ranks\n", outcome.err)
        self.assertEqual(self.losses("run_restart"), self.undisturbed("restart", "--hostfile", "pair", *self.ssh_flags()))

    @needs("ssh", "sshd")
    def test_a_host_is_lost(self):
        """Three ranks on two hosts, then two on the one that is left, on the same samples."""
        outcome = self.kill_n2_and_finish("lost", "--hostfile", "hosts", "--nnodes", "1:2", comes_back=False)
        self.assertIn("restart 1 of 1: 2 ranks instead of 3, without host n2\n", outcome.err)
        self.assertIn("batch 12 = 3 x 2 accumulated x 2 ranks", outcome.out)
        calm = self.undisturbed("lost", "--nproc", 3)
        largest = max(abs(a - b) / b for one, other in zip(self.losses("run_lost"), calm) for a, b in zip(one, other))
        self.assertLess(largest, 1e-5)

    def check_resumed_in_memory(self, outcome):
        """On n1, and at most the step under way is lost."""
        found = re.search(r"resuming after step (\d+), from /dev/shm/tessera_memory_[0-9a-f]{32}_0/global_step(\d+)", outcome.out)
        self.assertTrue(found, outcome)
        self.assertEqual(found[1], found[2])
        self.assertGreaterEqual(int(found[1]), self.num_recorded - 1)

    @needs("ssh", "sshd")
    def test_restart_from_memory_on_a_host_that_was_killed(self):
        """What was in the memory of n2 comes from n1's copy; n2 has a new folder then."""
        outcome = self.kill_n2_and_finish("memory", "--hostfile", "pair", "--max-restarts", 1, comes_back=True, save_every_steps=300,
                                          save_in_memory_every_steps=1)
        self.check_resumed_in_memory(outcome)
        self.assertEqual(self.losses("run_memory"), self.undisturbed("memory", "--hostfile", "pair", *self.ssh_flags()))

    @needs("ssh", "sshd")
    def test_a_host_is_lost_with_its_memory(self):
        outcome = self.kill_n2_and_finish("less", "--hostfile", "hosts", "--nnodes", "1:2", comes_back=False, save_every_steps=300,
                                          save_in_memory_every_steps=1)
        self.check_resumed_in_memory(outcome)
        calm = self.undisturbed("less", "--nproc", 3)
        largest = max(abs(a - b) / b for one, other in zip(self.losses("run_less"), calm) for a, b in zip(one, other))
        self.assertLess(largest, 1e-5)


if __name__ == "__main__":
    hosts_case.main()
