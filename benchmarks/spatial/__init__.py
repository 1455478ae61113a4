"""Cut images: GEMS beside one process, and beside what two cores give at best."""
