"""Graders, which give completions their rewards; their specs, which tasks pass; and the code that runs them, in
`tasks.graders.running`. An exception of a grader never becomes a reward."""
