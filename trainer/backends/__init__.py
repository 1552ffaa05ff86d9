"""What a run gets its services and engines from: `job_group`, or `in_process` on this machine."""
