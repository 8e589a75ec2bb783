"""How often noise changes a network's answer: estimates with intervals, from common flips to one in 10¹²."""
