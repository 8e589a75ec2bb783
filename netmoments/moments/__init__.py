"""What the moments of the logits say about the network: who wins, how often."""
