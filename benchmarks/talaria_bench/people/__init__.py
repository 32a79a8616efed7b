"""What a fleet is worth to people it never met: everybody is a newcomer once, and all others are the fleet."""
