"""GenEval (arXiv 2310.11513): are the objects there, in number, colour and place? Judged from detections."""
