"""VBench (Huang et al., arXiv 2311.17982): which videos it wants, whether they are all there, and its totals."""
