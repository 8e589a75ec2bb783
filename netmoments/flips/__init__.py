"""How often noise changes a network's answer, from common flips to one in 10¹²: estimates with intervals."""
