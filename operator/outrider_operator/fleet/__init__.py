"""What the fleet of one SpeculativeModel does, and what to do about it: samples, speculation policy, autoscaling."""
