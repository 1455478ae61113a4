"""What runs where: the plan and its fields."""
