//! How a draw is run again from a shell.

use std::path::{Path, PathBuf};

use quintet_ref_trainer::job::{DataSource, Job};

use super::Draw;

impl Draw {
    /// The command that runs this draw again: writes the job and the text beside the test's other
    /// files, under `name`.
    ///
    /// # Errors
    /// What cannot be written.
    pub fn replay(&self, name: &str) -> std::io::Result<String> {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        let job = self.write(&folder)?;
        Ok(format!("quintet verify --config {}", job.display()))
    }

    /// Writes the job and its text; the job's file.
    ///
    /// # Errors
    /// What cannot be written.
    pub fn write(&self, folder: &Path) -> std::io::Result<PathBuf> {
        let (job, text) = (folder.join("config.json"), folder.join("text"));
        let told = Job {
            data: DataSource::File(text.clone()),
            ..self.job.clone()
        };
        std::fs::create_dir_all(folder)?;
        std::fs::write(&text, self.text())?;
        let json = told.to_json().map_err(std::io::Error::other)?;
        std::fs::write(&job, json)?;
        Ok(job)
    }
}
