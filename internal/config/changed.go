package config

import "reflect"

// Changed lists the keys in which two configurations differ, as "section.key", in the order of the file. Of a
// section that is a map by name, as [registry."HOST"], it has the section alone.
func Changed(a, b Config) []string {
	var keys []string
	x, y := reflect.ValueOf(a), reflect.ValueOf(b)
	for i := range x.NumField() {
		section := x.Type().Field(i).Tag.Get("toml")
		s, t := x.Field(i), y.Field(i)
		if s.Kind() != reflect.Struct {
			if !reflect.DeepEqual(s.Interface(), t.Interface()) {
				keys = append(keys, section)
			}
			continue
		}
		for j := range s.NumField() {
			if !reflect.DeepEqual(s.Field(j).Interface(), t.Field(j).Interface()) {
				keys = append(keys, section+"."+s.Type().Field(j).Tag.Get("toml"))
			}
		}
	}
	return keys
}
