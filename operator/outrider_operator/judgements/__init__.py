"""What each condition says and why: chains of small judgements, the first that has something to say wins."""
