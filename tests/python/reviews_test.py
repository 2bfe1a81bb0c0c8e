"""examples/python/reviews_trainer.py trains on reviews made here, and what it saves is a model for transformers' pipeline."""
import itertools
import re
import unittest

from ranks import ROOT, TESSERA, RanksTest, python

SUBJECTS = ["房间", "服务", "这本书", "早餐", "电池", "屏幕", "位置", "作者", "包装", "快递"]
GOOD = ["非常好", "很满意", "值得推荐", "不错, 喜欢"]
BAD = ["太差了", "很失望", "不值得买", "糟糕, 讨厌"]
ENDS = ["。", "!", " 朋友也这么说", "，下次再说", " OK 2"]


class Reviews(RanksTest):
    def test_trains_evaluates_and_saves(self):
        for name, words in (("pos", GOOD), ("neg", BAD)):
            lines = ["".join(parts) for parts in itertools.product(SUBJECTS, words, ENDS)]
            (self.folder / f"{name}.txt").write_text("\n".join([*lines, lines[0], "好坏都有", ""]), encoding="utf-8")
        script = ROOT / "examples" / "python" / "reviews_trainer.py"
        (text,) = self.finish([self.start(TESSERA, "launch", "-n", 2, "--", *python(), script, "--data", self.folder, "--max-steps", 40, "--stage", 3,
                                          "--out", "out", "--bf16")])
        found = re.search(r"after 40 steps: test accuracy ([0-9.]+) on 40 reviews", text)
        self.assertTrue(found, text)
        self.assertGreater(float(found[1]), 0.9, text)

        import transformers
        classify = transformers.pipeline("text-classification", str(self.folder / "out"))
        labels = [answer["label"] for answer in classify(["酒店很满意", "手机太差了"])]
        self.assertEqual(labels, ["pos", "neg"])


if __name__ == "__main__":
    unittest.main()
