"""Trees from several sources: what a round of them costs, and what they bring where texts resemble earlier ones."""
