//! A table indexed by endpoint, for data that is read far more often than it is built.

use attache_types::ids::EndpointId;

/// Values by endpoint. Ids are assigned in ascending order, so the ids of one pool are close together and an
/// array index replaces a hash.
#[derive(Clone, Debug)]
pub struct ByEndpoint<T> {
    /// The endpoint id of the first array element.
    first: u32,
    places: Vec<Option<T>>,
}

impl<T> Default for ByEndpoint<T> {
    fn default() -> Self {
        Self { first: 0, places: Vec::new() }
    }
}

impl<T> ByEndpoint<T> {
    /// Returns the value of an endpoint.
    #[inline]
    #[must_use]
    pub fn get(&self, id: &EndpointId) -> Option<&T> {
        self.places.get(id.0.checked_sub(self.first)? as usize)?.as_ref()
    }

    /// Returns all values, in the order of endpoint ids.
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.places.iter().flatten()
    }

    /// Returns all endpoints with their values, in the order of ids.
    pub fn iter(&self) -> impl Iterator<Item = (EndpointId, &T)> {
        let id = |place: usize| EndpointId(self.first.saturating_add(u32::try_from(place).unwrap_or(u32::MAX)));
        self.places.iter().enumerate().filter_map(move |(place, value)| Some((id(place), value.as_ref()?)))
    }
}

impl<T> FromIterator<(EndpointId, T)> for ByEndpoint<T> {
    fn from_iter<I: IntoIterator<Item = (EndpointId, T)>>(values: I) -> Self {
        let values: Vec<(EndpointId, T)> = values.into_iter().collect();
        let first = values.iter().map(|(id, _)| id.0).min().unwrap_or(0);
        let last = values.iter().map(|(id, _)| id.0).max();
        let mut places: Vec<Option<T>> = Vec::new();
        places.resize_with(last.map_or(0, |last| (last - first) as usize + 1), || None);
        for (id, value) in values {
            if let Some(place) = places.get_mut((id.0 - first) as usize) {
                *place = Some(value);
            }
        }
        Self { first, places }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inserted_values_are_found_and_no_others() {
        let ids = [9, 7, 1_000_012, 1_000_000];
        for ids in [&ids[..2], &ids[2..], &[], &[3]] {
            let table: ByEndpoint<u32> = ids.iter().map(|id| (EndpointId(*id), id * 2)).collect();
            let mut sorted: Vec<u32> = ids.to_vec();
            sorted.sort_unstable();
            assert_eq!(
                table.iter().map(|(id, value)| (id.0, *value)).collect::<Vec<_>>(),
                sorted.iter().map(|i| (*i, i * 2)).collect::<Vec<_>>()
            );
            assert_eq!(table.values().count(), ids.len());
            for id in [0, 3, 7, 8, 9, 10, 1_000_000, 1_000_012, u32::MAX] {
                assert_eq!(table.get(&EndpointId(id)).copied(), ids.contains(&id).then(|| id * 2), "{id}");
            }
        }
    }
}
