//! `--metrics`: the file that a command writes its metrics to.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use super::CommandError;

/// The destination of metrics. It is opened before the work begins, so that a command does not fail
/// to write them after hours.
pub struct MetricsFile {
    writer: Box<dyn Write>,
}

impl MetricsFile {
    /// Opens the file `target`, or stdout for `-`.
    ///
    /// # Errors
    /// If the file cannot be opened for writing.
    pub fn open(target: &Path) -> Result<Self, CommandError> {
        if target == Path::new("-") {
            let writer = Box::new(std::io::stdout());
            return Ok(Self { writer });
        }
        let file = File::create(target).map_err(|error| {
            let path = target.display();
            CommandError::Failed(format!(
                "metrics '{path}': {error}: give a path that can be written"
            ))
        })?;
        let writer = Box::new(file);
        Ok(Self { writer })
    }

    /// Writes the metrics.
    ///
    /// # Errors
    /// If the write fails, for example for want of space.
    pub fn write(mut self, text: &str) -> Result<(), CommandError> {
        self.writer
            .write_all(text.as_bytes())
            .and_then(|()| self.writer.flush())
            .map_err(|error| CommandError::Failed(format!("metrics: {error}: free some space")))
    }
}
