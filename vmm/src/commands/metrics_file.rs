//! `--metrics`: where the metrics of a command go.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use super::CommandError;

/// A place for metrics, opened before the work begins: it is a pity to run for hours and then have nowhere to write.
pub struct MetricsFile {
    writer: Box<dyn Write>,
}

impl MetricsFile {
    /// Opens the file `target`, or stdout for `-`.
    ///
    /// # Errors
    /// If it cannot be written.
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
    /// If there is no space left, for instance.
    pub fn write(mut self, text: &str) -> Result<(), CommandError> {
        self.writer
            .write_all(text.as_bytes())
            .and_then(|()| self.writer.flush())
            .map_err(|error| CommandError::Failed(format!("metrics: {error}: free some space")))
    }
}
