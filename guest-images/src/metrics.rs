//! Reads the output of `walvisor run --metrics`, which is in the Prometheus text format.

/// The samples of one metrics file.
pub struct Metrics {
    samples: Vec<Sample>,
}

struct Sample {
    name: String,
    labels: Vec<(String, String)>,
    value: f64,
}

impl Metrics {
    /// Reads the samples of `text`. Comments and other lines are skipped.
    #[must_use]
    pub fn parse(text: &str) -> Self {
        Self {
            samples: text.lines().filter_map(parse_sample).collect(),
        }
    }

    /// The sum of all samples of metric `name` whose label `label` is `value`; `None` if there is
    /// none.
    #[must_use]
    pub fn sum(&self, name: &str, label: &str, value: &str) -> Option<f64> {
        self.total(name, |labels| {
            labels.iter().any(|(key, own)| key == label && own == value)
        })
    }

    /// The sum of all samples of metric `name`; `None` if there is none.
    #[must_use]
    pub fn value(&self, name: &str) -> Option<f64> {
        self.total(name, |_| true)
    }

    fn total(
        &self,
        name: &str,
        mut wanted: impl FnMut(&[(String, String)]) -> bool,
    ) -> Option<f64> {
        self.samples
            .iter()
            .filter(|sample| sample.name == name && wanted(&sample.labels))
            .map(|sample| sample.value)
            .reduce(|sum, value| sum + value)
    }
}

/// Parses `name{key="value",key="value"} 1.5`. Label values never contain escapes or commas here.
fn parse_sample(line: &str) -> Option<Sample> {
    let line = line.trim();
    if line.starts_with('#') {
        return None;
    }
    let (head, value) = line.rsplit_once(' ')?;
    let (name, labels) = match head.split_once('{') {
        None => (head, ""),
        Some((name, labels)) => (name, labels.strip_suffix('}')?),
    };
    let labels = labels
        .split(',')
        .filter_map(|pair| pair.split_once('='))
        .map(|(key, value)| (key.trim().to_owned(), value.trim_matches('"').to_owned()))
        .collect();
    Some(Sample {
        name: name.to_owned(),
        labels,
        value: value.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_summed_over_the_other_labels() {
        let metrics = Metrics::parse(
            "# HELP flushes of a queue\n\
             flushes{disk=\"a\",queue=\"0\"} 2\nflushes{disk=\"a\",queue=\"1\"} 3\nflushes{disk=\"b\",queue=\"0\"} 5\n\
             plain 1.5\nbroken{ 3\n",
        );
        assert_eq!(metrics.sum("flushes", "disk", "a"), Some(5.0));
        assert_eq!(metrics.value("flushes"), Some(10.0));
        assert_eq!(metrics.value("plain"), Some(1.5));
        assert_eq!(metrics.sum("flushes", "disk", "c"), None);
        assert_eq!(metrics.value("missing"), None);
        assert_eq!(metrics.value("broken"), None);
    }
}
