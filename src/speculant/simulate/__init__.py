"""The full loop on known distributions, where every answer can be computed: numpy only, no torch.

draws.py       drawing from many known distributions at once; residuals
world.py       target and draft as tables: context-free and Markov
chains.py      a sampled chain under the token rule and the block rule
trees.py       sampled siblings; chosen nodes
dynamic.py     nodes chosen by confidence, as EAGLE-2 does
broken.py      wrong rules that are in use, to see the test fail
loop.py        rounds over many rows at once: texts, counters, standard errors
exact.py       what theory says about the same worlds and strategies
chisquare.py   Pearson's test without scipy
theorem.py, sweep.py, quality.py, compare.py, rollback.py    one a subcommand
report.py, plots.py                                          for people
"""
