"""What a completion is worth: graders, the specs by which they cross a task, and the loop that runs them
without ever turning an exception into a reward."""
