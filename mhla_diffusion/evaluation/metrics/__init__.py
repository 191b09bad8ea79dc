"""Distances between sets of pictures: functions of features, and `torchmetrics.Metric` classes that gather them."""
