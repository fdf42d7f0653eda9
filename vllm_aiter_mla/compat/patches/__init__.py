"""What this plugin changes in vLLM, one file each: symptom, why, probe, and when the patch can go."""
